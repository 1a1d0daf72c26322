#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include "bindings.h"

namespace shardtensor::python {

namespace {

// CRC-32C: its polynomial is the one that processors have an instruction for.
constexpr uint32_t kPolynomial = 0x82f63b78;

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) {
      rest = (rest >> 1) ^ ((rest & 1) ? kPolynomial : 0);
    }
    table[byte] = rest;
  }
  return table;
}

uint32_t by_table(const uint8_t* data, size_t size, uint32_t rest) {
  static constexpr auto table = make_table();
  for (size_t i = 0; i < size; ++i) {
    rest = (rest >> 8) ^ table[(rest ^ data[i]) & 0xff];
  }
  return rest;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t
by_instruction(const uint8_t* data, size_t size, uint32_t before) {
  uint64_t rest = before;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, data, 8);
    rest = _mm_crc32_u64(rest, word);
  }
  return by_table(data, size, static_cast<uint32_t>(rest));
}
#endif

uint32_t update(const uint8_t* data, size_t size, uint32_t rest) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) {
    return by_instruction(data, size, rest);
  }
#endif
  return by_table(data, size, rest);
}

/// Of the bytes of a buffer that follow others whose checksum is `before`.
uint32_t crc32c(const py::buffer& buffer, uint32_t before) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
    throw py::error_already_set();
  }
  const auto* data = static_cast<const uint8_t*>(view.buf);
  uint32_t result = 0;
  {
    py::gil_scoped_release release;
    result = ~update(data, static_cast<size_t>(view.len), ~before);
  }
  PyBuffer_Release(&view);
  return result;
}

} // namespace

void bind_checkpoint(py::module_& module) {
  module.def("crc32c", &crc32c, py::arg("data"), py::arg("before") = 0);
}

} // namespace shardtensor::python
