#include "step.h"

#include <sstream>

#include <ATen/ATen.h>

namespace {

void expect(const Package& package, const std::string& program, const std::string& pools) {
  if (package.program() != program || package.pools() != pools) {
    refuse("it holds the program '" + package.program() + "' with pools as " + package.pools() + "; '" + program +
           "' with pools as " + pools + " is needed here (one package: the whole step; two: verify, then commit)");
  }
}

void expect(const Port& port, const std::string& name, at::ScalarType dtype, const std::vector<int64_t>& shape) {
  if (port.name != name || port.dtype != dtype || port.shape != shape) {
    std::ostringstream message;
    message << "expected " << name << " (" << dtype << ", [" << c10::IntArrayRef(shape) << "]), found " << port.name
            << " (" << port.dtype << ", [" << c10::IntArrayRef(port.shape) << "])";
    refuse(message.str());
  }
}

bool is_pool(const Port& port) { return port.name.rfind("pools.", 0) == 0; }

}  // namespace

SpeculativeStep::SpeculativeStep(const std::vector<std::string>& paths) {
  for (const auto& path : paths) {
    packages_.emplace_back(path);
  }
  if (packages_.size() == 1) {
    expect(packages_[0], "step", "buffers");
  } else {
    expect(packages_.at(0), "verify", "inputs");
    expect(packages_.at(1), "commit", "inputs");
  }
  device_ = packages_[0].device();
  std::vector<Port> inputs;
  auto pools = packages_[0].buffers();
  for (const auto& port : packages_[0].inputs()) {
    (is_pool(port) ? pools : inputs).push_back(port);
  }
  if (inputs.size() != 8 || inputs[0].shape.size() != 2 || inputs[7].shape.size() != 2) {
    refuse("it does not take the eight inputs of a speculative step");
  }
  window_ = inputs[0].shape[1];
  constexpr int64_t vocabulary = 256;  // text is bytes
  expect(inputs[0], "window", at::kLong, {1, window_});
  const char* integers[] = {"num_drafts", "num_forced", "positions", "slots"};
  for (size_t i = 0; i < 4; ++i) {
    expect(inputs[1 + i], integers[i], at::kLong, {1});
  }
  expect(inputs[5], "temperature", at::kFloat, {1});
  expect(inputs[6], "uniform", at::kFloat, {1, window_});
  expect(inputs[7], "exponential", at::kFloat, {1, vocabulary});
  for (const auto& port : pools) {
    if (port.name.rfind("pools.key_", 0) == 0) {
      max_length_ = port.shape.at(1);
    }
  }
  // Slot 0, greedy, and the noise that greedy decoding ignores.
  values_ = {{"slots", one(0)},
             {"temperature", at::zeros({1}).to(device_)},
             {"uniform", at::zeros({1, window_}).to(device_)},
             {"exponential", at::ones({1, vocabulary}).to(device_)}};
  for (const auto& package : packages_) {
    for (const auto& port : package.inputs()) {
      if (is_pool(port) && values_.count(port.name) == 0) {
        values_[port.name] = at::zeros(port.shape, at::TensorOptions(port.dtype).device(device_));
      }
    }
  }
}

at::Tensor SpeculativeStep::one(int64_t value) const {
  return at::full({1}, value, at::kLong).to(device_);
}

std::vector<at::Tensor> SpeculativeStep::given(const Package& package) const {
  std::vector<at::Tensor> tensors;
  for (const auto& port : package.inputs()) {
    const auto found = values_.find(port.name);
    if (found == values_.end()) {
      refuse("its program '" + package.program() + "' takes " + port.name +
             ", which nothing here gives it; both halves should be of one export");
    }
    tensors.push_back(found->second);
  }
  return tensors;
}

Accepted SpeculativeStep::step(const std::string& row, int64_t drafts, int64_t forced, int64_t position) {
  at::Tensor window = at::empty({1, window_}, at::kLong);
  for (int64_t t = 0; t < window_; ++t) {
    window.data_ptr<int64_t>()[t] = static_cast<unsigned char>(row[t]);
  }
  values_["window"] = window.to(device_);
  values_["num_drafts"] = one(drafts);
  values_["num_forced"] = one(forced);
  values_["positions"] = one(position);
  // Of the step and of the verify half: the tokens, their count, and what the commit half takes.
  const auto outputs = packages_[0].run(given(packages_[0]));
  if (packages_.size() == 2) {
    const auto& ports = packages_[0].outputs();
    for (size_t i = 0; i < ports.size(); ++i) {
      values_[ports[i].name] = outputs.at(i);
    }
    values_["num_accepted"] = outputs.at(1);
    packages_[1].run(given(packages_[1]));
  }
  const int64_t count = outputs.at(1).item<int64_t>();
  const at::Tensor tokens = outputs.at(0).cpu().contiguous();
  Accepted result{std::string(), count};
  for (int64_t t = 0; t < count; ++t) {
    result.tokens.push_back(static_cast<char>(tokens.data_ptr<int64_t>()[t]));
  }
  return result;
}
