#include "package.h"

#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include <ATen/ATen.h>
#include <torch/version.h>

namespace {

at::ScalarType scalar_type(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> types = {
      {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf},
      {"int64", at::kLong},    {"int32", at::kInt},         {"bool", at::kBool}};
  const auto found = types.find(name);
  if (found == types.end()) {
    refuse("dtype " + name + " is not known here");
  }
  return found->second;
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
    Port port{word.substr(0, first), scalar_type(word.substr(first + 1, second - first - 1)), {}};
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

}  // namespace

void refuse(const std::string& what) {
  throw std::runtime_error("this package is not for this runner: " + what);
}

Package::Package(const std::string& path)
    : loader_(std::make_unique<torch::inductor::AOTIModelPackageLoader>(path)) {
  auto metadata = loader_->get_metadata();
  auto entry = [&](const std::string& name) -> const std::string& {
    const auto found = metadata.find("recoverssm." + name);
    if (found == metadata.end()) {
      refuse("it has no metadata recoverssm." + name);
    }
    return found->second;
  };
  program_ = entry("program");
  pools_ = entry("pools");
  if (entry("torch") != TORCH_VERSION && entry("torch").substr(0, entry("torch").find('+')) != TORCH_VERSION) {
    refuse("it was compiled with torch " + entry("torch") + ", the runner with " TORCH_VERSION);
  }
  if (entry("device") == "cuda") {
    if (!at::hasCUDA()) {
      refuse("it was compiled for CUDA, and there is no CUDA GPU here or this libtorch knows none");
    }
    device_ = at::Device(at::kCUDA, 0);
  }
  inputs_ = parse_ports(entry("inputs"));
  outputs_ = parse_ports(entry("outputs"));
  buffers_ = parse_ports(entry("buffers"));
}
