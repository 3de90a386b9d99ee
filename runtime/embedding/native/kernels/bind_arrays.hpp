// Arrays of Python as kernels take them, and back: what the bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <utility>
#include <vector>

#include "buffers.hpp"
#include "pages.hpp"

namespace nb = nanobind;

namespace embedding {

using Ids = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32s = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::c_contig, nb::device::cpu>;  // float32 or float64
using ConstMatrix = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Inverse = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
nb::ndarray<nb::numpy, T> give(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(owned->data(), shape, owner);
}

template <class T>
nb::ndarray<nb::numpy, T> give_pages(Pages&& pages, std::initializer_list<size_t> shape) {
  auto* owned = new Pages(std::move(pages));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Pages*>(p); });
  return nb::ndarray<nb::numpy, T>(owned->data(), shape, owner);
}

struct Buffer {
  void* data;
  size_t bytes;
};

template <class T>
nb::ndarray<nb::numpy, T> empty(size_t rows, size_t columns) {
  const size_t bytes = rows * columns * sizeof(T);
  auto* buffer = new Buffer{take_buffer(bytes), bytes};
  nb::capsule owner(buffer, [](void* p) noexcept {
    auto* held = static_cast<Buffer*>(p);
    give_buffer(held->data, held->bytes);
    delete held;
  });
  return nb::ndarray<nb::numpy, T>(buffer->data, {rows, columns}, owner);
}

inline nb::object give_floats(std::vector<char>&& bytes, size_t rows, size_t columns, bool wide) {
  auto* owned = new std::vector<char>(std::move(bytes));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<char>*>(p); });
  if (wide) {
    return nb::cast(nb::ndarray<nb::numpy, double>(owned->data(), {rows, columns}, owner));
  }
  return nb::cast(nb::ndarray<nb::numpy, float>(owned->data(), {rows, columns}, owner));
}

inline void require(bool holds, const char* rule) {
  if (!holds) throw std::invalid_argument(rule);
}

template <class Array>
bool is_wide(const Array& array) {
  return array.dtype() == nb::dtype<double>();
}

// Each adds its part to the module.
void bind_options(nb::module_& module);
void bind_table(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_pooling(nb::module_& module);

}  // namespace embedding
