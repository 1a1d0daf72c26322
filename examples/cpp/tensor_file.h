#pragma once

#include <fstream>
#include <map>
#include <string>

#include <ATen/ATen.h>

/// Named tensors from a file that tensor_file.py wrote: for each tensor its
/// name (length, bytes), dtype (0 float32, 1 int64), number of dims, sizes and
/// elements; all numbers are int64, everything little-endian.
inline std::map<std::string, at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path);
  int64_t number = 0;
  const auto next = [&] {
    file.read(reinterpret_cast<char*>(&number), sizeof(number));
    return number;
  };
  std::map<std::string, at::Tensor> tensors;
  while (file.peek() != std::ifstream::traits_type::eof()) {
    std::string name(next(), ' ');
    file.read(name.data(), static_cast<std::streamsize>(name.size()));
    const auto dtype = next() == 0 ? at::kFloat : at::kLong;
    std::vector<int64_t> sizes(next());
    for (auto& size : sizes) {
      size = next();
    }
    at::Tensor x = at::empty(sizes, dtype);
    file.read(
        static_cast<char*>(x.data_ptr()),
        static_cast<std::streamsize>(x.nbytes()));
    TORCH_CHECK(file, path, " ends too early");
    tensors.emplace(std::move(name), std::move(x));
  }
  return tensors;
}
