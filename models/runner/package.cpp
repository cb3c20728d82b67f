#include "package.h"

#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include <ATen/ATen.h>
#include <torch/version.h>

namespace {

struct Port {
  std::string name, dtype;
  std::vector<int64_t> shape;
};

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error("this package is not for this runner: " + what);
}

// "name:dtype:1x8 ..." as compile_passes writes it.
std::vector<Port> parse_ports(const std::string& text) {
  std::vector<Port> ports;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t first = word.find(':'), second = word.find(':', first + 1);
    if (second == std::string::npos) {
      refuse("'" + word + "' is no description of a tensor");
    }
    Port port{word.substr(0, first), word.substr(first + 1, second - first - 1), {}};
    std::istringstream sizes(word.substr(second + 1));
    for (std::string size; std::getline(sizes, size, 'x');) {
      if (size.find_first_not_of("0123456789") != std::string::npos) {
        refuse(port.name + " has a dynamic size; export it with static shapes");
      }
      port.shape.push_back(std::stoll(size));
    }
    ports.push_back(std::move(port));
  }
  return ports;
}

void expect(const Port& port, const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
  if (port.name != name || port.dtype != dtype || port.shape != shape) {
    std::ostringstream message;
    message << "expected " << name << " (" << dtype << ", [" << c10::IntArrayRef(shape) << "]), found " << port.name
            << " (" << port.dtype << ", [" << c10::IntArrayRef(port.shape) << "])";
    refuse(message.str());
  }
}

}  // namespace

SpeculativePackage::SpeculativePackage(const std::string& path)
    : loader_(std::make_unique<torch::inductor::AOTIModelPackageLoader>(path)) {
  auto metadata = loader_->get_metadata();
  auto entry = [&](const std::string& name) -> const std::string& {
    const auto found = metadata.find("recoverssm." + name);
    if (found == metadata.end()) {
      refuse("it has no metadata recoverssm." + name);
    }
    return found->second;
  };
  if (entry("program") != "step" || entry("pools") != "buffers") {
    refuse("it holds the program '" + entry("program") + "' with pools as " + entry("pools") +
           "; the whole step with pools as buffers is needed");
  }
  if (entry("torch") != TORCH_VERSION && entry("torch").substr(0, entry("torch").find('+')) != TORCH_VERSION) {
    refuse("it was compiled with torch " + entry("torch") + ", the runner with " TORCH_VERSION);
  }
  if (entry("device") == "cuda") {
    if (!at::hasCUDA()) {
      refuse("it was compiled for CUDA, and there is no CUDA GPU here or this libtorch knows none");
    }
    device_ = at::Device(at::kCUDA, 0);
  }
  const auto inputs = parse_ports(entry("inputs"));
  if (inputs.size() != 8 || inputs[0].shape.size() != 2 || inputs[7].shape.size() != 2) {
    refuse("it does not take the eight inputs of a speculative step");
  }
  window_ = inputs[0].shape[1];
  constexpr int64_t vocabulary = 256;  // text is bytes
  expect(inputs[0], "window", "int64", {1, window_});
  const char* integers[] = {"num_drafts", "num_forced", "positions", "slots"};
  for (size_t i = 0; i < 4; ++i) {
    expect(inputs[1 + i], integers[i], "int64", {1});
  }
  expect(inputs[5], "temperature", "float32", {1});
  expect(inputs[6], "uniform", "float32", {1, window_});
  expect(inputs[7], "exponential", "float32", {1, vocabulary});
  for (const auto& buffer : parse_ports(entry("buffers"))) {
    if (buffer.name.rfind("pools.key_", 0) == 0) {
      max_length_ = buffer.shape[1];
    }
  }
  constant_inputs_ = {one(0), at::zeros({1}).to(device_), at::zeros({1, window_}).to(device_),
                      at::ones({1, vocabulary}).to(device_)};
}

at::Tensor SpeculativePackage::one(int64_t value) const {
  return at::full({1}, value, at::kLong).to(device_);
}

Accepted SpeculativePackage::step(const std::string& row, int64_t drafts, int64_t forced, int64_t position) {
  at::Tensor window = at::empty({1, window_}, at::kLong);
  for (int64_t t = 0; t < window_; ++t) {
    window.data_ptr<int64_t>()[t] = static_cast<unsigned char>(row[t]);
  }
  std::vector<at::Tensor> inputs = {window.to(device_), one(drafts), one(forced), one(position)};
  inputs.insert(inputs.end(), constant_inputs_.begin(), constant_inputs_.end());
  const auto outputs = loader_->run(inputs);
  const int64_t count = outputs.at(1).item<int64_t>();
  const at::Tensor tokens = outputs.at(0).cpu().contiguous();
  Accepted result{std::string(), count};
  for (int64_t t = 0; t < count; ++t) {
    result.tokens.push_back(static_cast<char>(tokens.data_ptr<int64_t>()[t]));
  }
  return result;
}
