// An AOTInductor package of models.speculation.SpeculativeStep, checked against what this runner feeds it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

struct Accepted {
  std::string tokens;  // tokens[:n]; the last of them is newly sampled
  int64_t count;
};

class SpeculativePackage {
 public:
  // Throws std::runtime_error that names the difference, if the package is of another kind.
  explicit SpeculativePackage(const std::string& path);

  // One step of the only request: `row` is the last committed token, drafts and padding, `window()` tokens in all.
  Accepted step(const std::string& row, int64_t drafts, int64_t forced, int64_t position);

  int64_t window() const { return window_; }
  int64_t max_length() const { return max_length_; }

 private:
  at::Tensor one(int64_t value) const;  // [1], where the package runs

  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
  at::Device device_{at::kCPU};
  int64_t window_ = 0;
  int64_t max_length_ = 0;
  std::vector<at::Tensor> constant_inputs_;  // slots, temperature (greedy) and the noise that greedy decoding ignores
};
