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
using Int64s = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::c_contig, nb::device::cpu>;  // float32 or float64
using ConstMatrix = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Inverse = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A batch's rows in the tables of a server lie side by side: of each table, where its first id
// stands, how many there are, and the element of `numbers` at which the first row starts.
using Spans = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

// [2, tables + 1]: where those of each table start in the arrays of a batch.
using Starts = nb::ndarray<const int64_t, nb::shape<2, -1>, nb::c_contig, nb::device::cpu>;

// An array of numpy that keeps `held`, a vector, a column or pages, in which its numbers lie.
template <class T, class Held>
nb::ndarray<nb::numpy, T> give(Held&& held, std::initializer_list<size_t> shape) {
  auto* kept = new Held(std::move(held));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Held*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

template <class T>
nb::ndarray<nb::numpy, T> empty(size_t rows, size_t columns) {
  return give<T>(Column<T>(rows * columns), {rows, columns});
}

inline nb::object give_floats(std::vector<char>&& bytes, size_t rows, size_t columns, bool wide) {
  if (wide) return nb::cast(give<double>(std::move(bytes), {rows, columns}));
  return nb::cast(give<float>(std::move(bytes), {rows, columns}));
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
