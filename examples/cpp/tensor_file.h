#pragma once

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include <ATen/ATen.h>

// Named tensors in a file, as examples/python/tensor_file.py reads and writes
// them: for each tensor its name (length, bytes), dtype (the place in kDtypes),
// number of dims, sizes and elements; all numbers are int64, everything
// little-endian.

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kLong, at::kDouble};

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
    const auto dtype = kDtypes[next()];
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

inline void write_tensors(
    const std::string& path,
    const std::map<std::string, at::Tensor>& tensors) {
  std::ofstream file(path, std::ios::binary);
  const auto put = [&](int64_t number) {
    file.write(reinterpret_cast<const char*>(&number), sizeof(number));
  };
  for (const auto& [name, tensor] : tensors) {
    const auto x = tensor.cpu().contiguous();
    put(static_cast<int64_t>(name.size()));
    file.write(name.data(), static_cast<std::streamsize>(name.size()));
    put(std::ranges::find(kDtypes, x.scalar_type()) - std::begin(kDtypes));
    put(x.dim());
    for (const int64_t size : x.sizes()) {
      put(size);
    }
    file.write(
        static_cast<const char*>(x.const_data_ptr()),
        static_cast<std::streamsize>(x.nbytes()));
  }
  TORCH_CHECK(file, "cannot write ", path);
}
