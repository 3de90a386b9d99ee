// Arrays of Python as kernels take them, and back: what the bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace embedding {

using namespace nb::literals;

template <class T>
using Given = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = Given<uint64_t>;
using Int64s = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::c_contig, nb::device::cpu>;  // float32 or float64
using ConstMatrix = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

// A batch's rows in the tables of a server lie side by side: of each table, where its first id
// stands, how many there are, and the element of `numbers` at which the first row starts.
using Spans = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

// An array of numpy that keeps `held`, a vector, a column or pages, in which its numbers lie.
template <class T, class Held>
nb::ndarray<nb::numpy, T> give(Held&& held, std::initializer_list<size_t> shape) {
  auto* kept = new Held(std::move(held));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Held*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

// What `work` returns, done without the interpreter lock.
template <class Work>
auto unlocked(Work work) {
  const nb::gil_scoped_release free;
  return work();
}

inline void require(bool holds, const char* rule) {
  if (!holds) throw std::invalid_argument(rule);
}

void bind_plan(nb::module_& module);     // plan.cpp
void bind_pooling(nb::module_& module);  // pooling.cpp

}  // namespace embedding
