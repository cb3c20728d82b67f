// One program of compile_passes.export_step as an AOTInductor package, and what its metadata says of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

struct Port {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

[[noreturn]] void refuse(const std::string& what);

class Package {
 public:
  // Throws std::runtime_error that names the difference, if it was compiled for another torch or for a device that is not
  // here, or has dynamic shapes.
  explicit Package(const std::string& path);

  const std::string& program() const { return program_; }  // step, verify or commit
  const std::string& pools() const { return pools_; }      // buffers: inside the package; inputs: the caller's
  at::Device device() const { return device_; }
  const std::vector<Port>& inputs() const { return inputs_; }
  const std::vector<Port>& outputs() const { return outputs_; }
  const std::vector<Port>& buffers() const { return buffers_; }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return loader_->run(inputs); }

 private:
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
  std::string program_, pools_;
  at::Device device_{at::kCPU};
  std::vector<Port> inputs_, outputs_, buffers_;
};
