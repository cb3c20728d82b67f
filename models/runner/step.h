// One step of models.speculation.SpeculativeStep for one request: the whole step in one package, or its halves in two.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "package.h"

struct Accepted {
  std::string tokens;  // tokens[:n]; the last of them is newly sampled
  int64_t count;
};

class SpeculativeStep {
 public:
  // {step}, whose pools are its buffers, or {verify, commit}, whose pools are here and pass from one to the other. Throws
  // std::runtime_error that names the difference, if the packages are of another kind.
  explicit SpeculativeStep(const std::vector<std::string>& paths);

  // `row` is the last committed token, drafts and padding, `window()` tokens in all.
  Accepted step(const std::string& row, int64_t drafts, int64_t forced, int64_t position);

  int64_t window() const { return window_; }
  int64_t max_length() const { return max_length_; }

 private:
  at::Tensor one(int64_t value) const;  // [1], where the packages run
  std::vector<at::Tensor> given(const Package& package) const;

  std::vector<Package> packages_;
  at::Device device_{at::kCPU};
  int64_t window_ = 0;
  int64_t max_length_ = 0;
  // By name: the step's inputs, of the halves the pools, and what verify hands to commit.
  std::map<std::string, at::Tensor> values_;
};
