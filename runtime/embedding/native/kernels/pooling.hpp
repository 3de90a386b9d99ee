// Bags of rows -> field vectors, and the transpose; sums in the order of samples (law 6).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "prefetch.hpp"

namespace {

using embedding::Pool;
using embedding::PoolField;
using embedding::PoolKind;

constexpr size_t kAhead = 16;  // occurrences between prefetch and use

inline size_t bag_length(const Pool& call, size_t sample, const PoolField& field) {
  if (!call.offsets) return 1;
  const int64_t* const at = call.offsets + sample * call.bags + field.bag;
  return static_cast<size_t>(at[1] - at[0]);
}

// How many occurrences of this table stand before a sample.
inline size_t occurrences_before(const Pool& call, size_t sample) {
  if (!call.offsets) return sample * call.fields;
  if (call.fields == call.bags) return static_cast<size_t>(call.offsets[sample * call.bags]);
  size_t count = 0;
  for (size_t b = 0; b < sample; ++b) {
    for (size_t f = 0; f < call.fields; ++f) count += bag_length(call, b, call.field[f]);
  }
  return count;
}

template <class T>
T weight_of(PoolKind kind, size_t length) {
  const auto count = static_cast<double>(std::max<size_t>(length, 1));
  if (kind == PoolKind::mean) return static_cast<T>(1.0 / count);
  if (kind == PoolKind::sqrtn) return static_cast<T>(1.0 / std::sqrt(count));
  return 1;
}

// The rows of the bag that lies kAhead occurrences further on.
template <class T>
inline void prefetch_bag(const Pool& call, size_t at, size_t count, size_t total) {
  const size_t row_bytes = call.dim * sizeof(T);
  for (size_t i = at + kAhead; i < std::min(at + kAhead + count, total); ++i) {
    const char* row = static_cast<const char*>(call.rows) + call.inverse[i] * row_bytes;
    for (size_t byte = 0; byte < row_bytes; byte += 64) embedding::prefetch(row + byte);
  }
}

template <class T, size_t D>
inline void sum_rows(const Pool& call, const int32_t* which, size_t count, T weight, T* out) {
  const size_t dim = D ? D : call.dim;
  const T* rows = static_cast<const T*>(call.rows);
  if constexpr (D != 0) {
    T sum[D] = {};
    for (size_t i = 0; i < count; ++i) {
      const T* row = rows + which[i] * dim;
      for (size_t j = 0; j < D; ++j) sum[j] += weight * row[j];
    }
    std::memcpy(out, sum, sizeof sum);
  } else {
    std::fill(out, out + dim, T{0});
    for (size_t i = 0; i < count; ++i) {
      const T* row = rows + which[i] * dim;
      for (size_t j = 0; j < dim; ++j) out[j] += weight * row[j];
    }
  }
}

template <class T, size_t D>
void pool_samples(const Pool& call) {
  const size_t dim = D ? D : call.dim;
  const T* rows = static_cast<const T*>(call.rows);
  size_t at = occurrences_before(call, call.first_sample) * call.rounds;
  const size_t total = occurrences_before(call, call.last_sample) * call.rounds;
  for (size_t b = call.first_sample; b < call.last_sample; ++b) {
    for (size_t f = 0; f < call.fields; ++f) {
      const PoolField& field = call.field[f];
      const size_t length = bag_length(call, b, field);
      const int32_t* which = call.inverse + at;
      prefetch_bag<T>(call, at, length * call.rounds, total);
      at += length * call.rounds;
      if (field.kind == PoolKind::sequence) {
        T* out = static_cast<T*>(field.sequence) + b * field.max_length * dim;
        for (size_t l = 0; l < field.max_length; ++l) {
          const size_t count = l < length ? call.rounds : 0;
          sum_rows<T, D>(call, which + l * call.rounds, count, T{1}, out + l * dim);
          if (field.mask) field.mask[b * field.max_length + l] = l < length;
        }
        continue;
      }
      T* out = static_cast<T*>(call.pooled) + b * call.width + field.column;
      if (call.plain_copy) {
        std::memcpy(out, rows + which[0] * dim, dim * sizeof(T));
      } else {
        sum_rows<T, D>(call, which, length * call.rounds, weight_of<T>(field.kind, length), out);
      }
    }
  }
}

template <class T, size_t D>
inline void add_gradient(const Pool& call, const int32_t* which, size_t count, T weight,
                         const T* gradient) {
  const size_t dim = D ? D : call.dim;
  T* rows = static_cast<T*>(call.rows);
  for (size_t i = 0; i < count; ++i) {
    if (which[i] < call.first_row || which[i] >= call.last_row) continue;
    T* __restrict row = rows + which[i] * dim;
    for (size_t j = 0; j < dim; ++j) row[j] += weight * gradient[j];
  }
}

template <class T, size_t D>
void scatter_samples(const Pool& call) {
  const size_t dim = D ? D : call.dim;
  const size_t total = occurrences_before(call, call.samples) * call.rounds;
  std::fill(static_cast<T*>(call.rows) + call.first_row * dim,
            static_cast<T*>(call.rows) + call.last_row * dim, T{0});
  size_t at = 0;
  for (size_t b = 0; b < call.samples; ++b) {
    for (size_t f = 0; f < call.fields; ++f) {
      const PoolField& field = call.field[f];
      const size_t length = bag_length(call, b, field);
      const int32_t* which = call.inverse + at;
      prefetch_bag<T>(call, at, length * call.rounds, total);
      at += length * call.rounds;
      if (field.kind == PoolKind::sequence) {
        const T* gradient = static_cast<const T*>(field.sequence) + b * field.max_length * dim;
        for (size_t l = 0; l < std::min(length, field.max_length); ++l) {
          add_gradient<T, D>(call, which + l * call.rounds, call.rounds, T{1}, gradient + l * dim);
        }
        continue;
      }
      const T* gradient = static_cast<const T*>(call.pooled) + b * call.width + field.column;
      add_gradient<T, D>(call, which, length * call.rounds, weight_of<T>(field.kind, length),
                         gradient);
    }
  }
}

void pool(const Pool& call) {
  if (call.wide) return pool_samples<double, 0>(call);
  switch (call.dim) {
    case 8: return pool_samples<float, 8>(call);
    case 16: return pool_samples<float, 16>(call);
    case 32: return pool_samples<float, 32>(call);
    case 64: return pool_samples<float, 64>(call);
    case 128: return pool_samples<float, 128>(call);
    default: return pool_samples<float, 0>(call);
  }
}

void scatter(const Pool& call) {
  if (call.wide) return scatter_samples<double, 0>(call);
  switch (call.dim) {
    case 8: return scatter_samples<float, 8>(call);
    case 16: return scatter_samples<float, 16>(call);
    case 32: return scatter_samples<float, 32>(call);
    case 64: return scatter_samples<float, 64>(call);
    case 128: return scatter_samples<float, 128>(call);
    default: return scatter_samples<float, 0>(call);
  }
}

}  // namespace
