// One optimiser step on one row, and pooling; float16 for the wire is in half.hpp. Compiled once per
// instruction set (KERNEL_NAME is scalar, avx2 or avx512), so all but the last lines is never merged
// across them.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "half.hpp"
#include "machine.hpp"

namespace embedding {

namespace {

// The optimisers, in torch's formulas, in the order of operations of the reference.

template <class T>
struct Rule {
  explicit Rule(const Options& o)
      : eps(static_cast<T>(o.eps)),
        rest1(static_cast<T>(1 - kBeta1)),
        rest2(static_cast<T>(1 - kBeta2)),
        l1(static_cast<T>(o.l1)),
        l2(static_cast<T>(o.l2)) {}
  T eps, rest1, rest2, l1, l2;
};

// The mean of squares of a row, summed by halves: element j takes element j + half, and so on down
// to one. That is how a vector register is folded, and as exact in numpy.
template <class T, size_t D>
T mean_square(const T* g, size_t dim, T* scratch) {
  size_t size = 1;
  while (size < dim) size *= 2;
  for (size_t j = 0; j < dim; ++j) scratch[j] = g[j] * g[j];
  for (size_t j = dim; j < size; ++j) scratch[j] = 0;
  for (size_t half = size / 2; half; half /= 2) {
    for (size_t j = 0; j < half; ++j) scratch[j] += scratch[j + half];
  }
  return scratch[0] / static_cast<T>(dim);
}

template <OptimizerKind K, class T, size_t D>
inline void step_row(const Rule<T>& rule, T* __restrict v, T* __restrict s, const T* __restrict g,
                     size_t runtime_dim, T lr, T* __restrict scratch) {
  const size_t dim = D ? D : runtime_dim;
  if constexpr (K == OptimizerKind::sgd) {
    for (size_t j = 0; j < dim; ++j) v[j] -= lr * g[j];
  } else if constexpr (K == OptimizerKind::adagrad) {
    for (size_t j = 0; j < dim; ++j) {
      s[j] += g[j] * g[j];
      v[j] -= lr * g[j] / (std::sqrt(s[j]) + rule.eps);
    }
  } else if constexpr (K == OptimizerKind::adagrad_row) {
    s[0] += mean_square<T, D>(g, dim, scratch);
    const T root = std::sqrt(s[0]) + rule.eps;
    for (size_t j = 0; j < dim; ++j) v[j] -= lr * g[j] / root;
  } else if constexpr (K == OptimizerKind::adam) {
    T* __restrict square = s + dim;
    for (size_t j = 0; j < dim; ++j) {
      s[j] += rule.rest1 * (g[j] - s[j]);
      square[j] += rule.rest2 * (g[j] * g[j] - square[j]);
      v[j] -= lr * s[j] / (std::sqrt(square[j]) + rule.eps);
    }
  } else if constexpr (K == OptimizerKind::adam_row) {
    s[dim] += rule.rest2 * (mean_square<T, D>(g, dim, scratch) - s[dim]);
    const T root = std::sqrt(s[dim]) + rule.eps;
    for (size_t j = 0; j < dim; ++j) {
      s[j] += rule.rest1 * (g[j] - s[j]);
      v[j] -= lr * s[j] / root;
    }
  } else {
    // FTRL-proximal (McMahan et al. 2013), its proximal form at a rate of any step. A row that stands
    // at v has z = -(v * slope / lr + held), where slope / lr = (1 + sqrt(n)) / lr + l2 and held is
    // the part of l1 that the row leans on: -l1, l1, or at 0 the gradients that l1 holds back. So z is
    // made from the row at today's rate, and no rate of before is kept: where nothing was learned, a
    // rate that changes moves nothing. An element without a gradient yet (n = 0) starts from its
    // initial value, which l2 has not pulled at. State: n, and with l1 what is held.
    if (lr == 0) return;
    T* __restrict held = s + dim;
    for (size_t j = 0; j < dim; ++j) {
      const T grown = s[j] + g[j] * g[j];
      const T root = T{1} + std::sqrt(grown), slope = root + lr * rule.l2;
      const T start = s[j] == 0 ? v[j] * (root / slope) : v[j];
      const T leaning = rule.l1 > 0 ? held[j] : T{0};
      const T moved = start - lr * (g[j] + leaning) / slope;
      const T sign = moved < 0 ? T{-1} : T{1};
      const T excess = moved * sign - lr * rule.l1 / slope;
      const bool still = g[j] == 0 || grown == 0;
      if (rule.l1 > 0) {
        const T within = v[j] == 0 ? leaning + g[j] : -(moved * slope) / lr;
        const T now = excess <= 0 ? within : -(sign * rule.l1);
        held[j] = still ? leaning : now;
      }
      const T next = excess <= 0 ? T{0} : sign * excess;
      v[j] = still ? v[j] : next;
      s[j] = grown;
    }
  }
}

template <OptimizerKind K, class T, size_t D>
void step_all(const RowStep& call) {
  const Options& options = *call.options;
  const Rule<T> rule(options);
  const T lr = static_cast<T>(call.factor);
  const size_t dim = D ? D : options.dim;
  T small[D ? 2 * D : 1];
  std::vector<T> large(D ? 0 : 2 * dim + 1);
  T* scratch = D ? small : large.data();
  for (size_t i = 0; i < call.n; ++i) {
    if (i < call.next_n) {
      if (call.next_gradients) prefetch(call.next_gradients[i]);
      prefetch_span(call.rows + call.next_slots[i] * call.stride, call.stride);
    }
    char* row = call.rows + call.slots[i] * call.stride;
    auto* state = reinterpret_cast<T*>(row + options.state_offset());
    const auto* gradient = static_cast<const T*>(call.gradients[i]);
    step_row<K, T, D>(rule, reinterpret_cast<T*>(row), state, gradient, dim, lr, scratch);
  }
}

template <class T, size_t D>
void step_kind(const RowStep& call) {
  switch (call.options->optimizer) {
    case OptimizerKind::sgd: return step_all<OptimizerKind::sgd, T, D>(call);
    case OptimizerKind::adagrad: return step_all<OptimizerKind::adagrad, T, D>(call);
    case OptimizerKind::adagrad_row: return step_all<OptimizerKind::adagrad_row, T, D>(call);
    case OptimizerKind::adam: return step_all<OptimizerKind::adam, T, D>(call);
    case OptimizerKind::adam_row: return step_all<OptimizerKind::adam_row, T, D>(call);
    case OptimizerKind::ftrl: return step_all<OptimizerKind::ftrl, T, D>(call);
  }
}

void step_rows(const RowStep& call) {
  if (call.options->wide) return step_kind<double, 0>(call);
  by_dim(call.options->dim, [&]<size_t D>() { step_kind<float, D>(call); });
}

// Bags of rows -> field vectors, and the transpose; sums in the order of samples (law 6).

constexpr size_t kAhead = 16;        // occurrences between prefetch and use
constexpr size_t kSamplesAhead = 4;  // of gradients

// D numbers in registers. By name, for g++ 12 takes a loop over so few numbers apart into single ones
// and makes no vector of them: pooling of 8 ids a field took 17 ns an id (measured 2026-11).
template <class T, size_t D>
class Vectors {
 public:
  Vectors() = default;
  explicit Vectors(const T* from) { std::memcpy(parts_, from, sizeof parts_); }
  void store(T* to) const { std::memcpy(to, parts_, sizeof parts_); }
  void add(T weight, const Vectors& other) {
    for (size_t k = 0; k < kParts; ++k) parts_[k] += weight * other.parts_[k];
  }

 private:
#if defined(__AVX512F__)
  static constexpr size_t kRegister = 64;
#elif defined(__AVX2__)
  static constexpr size_t kRegister = 32;
#else
  static constexpr size_t kRegister = 16;
#endif
  static constexpr size_t kBytes = std::min(kRegister, D * sizeof(T));
  static constexpr size_t kParts = D * sizeof(T) / kBytes;
  typedef T Part __attribute__((vector_size(kBytes)));
  Part parts_[kParts] = {};
};

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
    for (size_t byte = 0; byte < row_bytes; byte += 64) prefetch(row + byte);
  }
}

template <class T, size_t D>
inline void sum_rows(const Pool& call, const int32_t* which, size_t count, T weight, T* out) {
  const size_t dim = D ? D : call.dim;
  const T* rows = static_cast<const T*>(call.rows);
  if constexpr (D != 0) {
    Vectors<T, D> sum = {};
    for (size_t i = 0; i < count; ++i) sum.add(weight, Vectors<T, D>(rows + which[i] * dim));
    sum.store(out);
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
  size_t at = occurrences_before(call, call.first_sample);
  const size_t total = occurrences_before(call, call.last_sample);
  for (size_t b = call.first_sample; b < call.last_sample; ++b) {
    for (size_t f = 0; f < call.fields; ++f) {
      const PoolField& field = call.field[f];
      const size_t length = bag_length(call, b, field);
      const int32_t* which = call.inverse + at;
      prefetch_bag<T>(call, at, length, total);
      at += length;
      if (field.kind == PoolKind::sequence) {
        T* out = static_cast<T*>(field.sequence) + b * field.max_length * dim;
        for (size_t l = 0; l < field.max_length; ++l) {
          sum_rows<T, D>(call, which + l, l < length, T{1}, out + l * dim);
          if (field.mask) field.mask[b * field.max_length + l] = l < length;
        }
        continue;
      }
      T* out = static_cast<T*>(call.pooled) + b * call.width + field.column;
      if (call.plain_copy) {
        std::memcpy(out, rows + which[0] * dim, dim * sizeof(T));
      } else {
        sum_rows<T, D>(call, which, length, weight_of<T>(field.kind, length), out);
      }
    }
  }
}

// The occurrences of a call's fields, sample by sample: those of one sample lie side by side.
class Occurrences {
 public:
  explicit Occurrences(const Pool& call) : call_(call) {}

  // Goes on to the next sample; false behind the last one.
  bool next() {
    if (sample_ == call_.samples) return false;
    if (!call_.offsets) {
      from = sample_ * call_.fields + call_.first_field;
      to = from + call_.last_field - call_.first_field;
    } else if (call_.fields == call_.bags) {
      const int64_t* const at = call_.offsets + sample_ * call_.bags;
      from = static_cast<size_t>(at[call_.first_field]);
      to = static_cast<size_t>(at[call_.last_field]);
    } else {
      from = behind_;
      for (size_t f = 0; f < call_.fields; ++f) {
        const size_t count = bag_length(call_, sample_, call_.field[f]);
        if (f < call_.first_field) from += count;
        if (f + 1 == call_.last_field) to = behind_ + count;
        behind_ += count;
      }
    }
    ++sample_;
    return true;
  }

  size_t from = 0, to = 0;

 private:
  const Pool& call_;
  size_t sample_ = 0;
  size_t behind_ = 0;  // this table's occurrences of all samples before
};

template <bool SomeRows, class T, size_t D>
inline void add_gradient(const Pool& call, const int32_t* which, size_t count, T weight,
                         const T* gradient) {
  const size_t dim = D ? D : call.dim;
  T* rows = static_cast<T*>(call.rows);
  for (size_t i = 0; i < count; ++i) {
    if (SomeRows && (which[i] < call.first_row || which[i] >= call.last_row)) continue;
    T* row = rows + which[i] * dim;
    if constexpr (D != 0) {
      Vectors<T, D> sum(row);
      sum.add(weight, Vectors<T, D>(gradient));
      sum.store(row);
    } else {
      for (size_t j = 0; j < dim; ++j) row[j] += weight * gradient[j];
    }
  }
}

// Adds what the samples give to the rows of the call's fields; with SomeRows only to rows of a range.
template <bool SomeRows, class T, size_t D>
void scatter_samples(const Pool& call) {
  const size_t dim = D ? D : call.dim, row_bytes = dim * sizeof(T);
  const char* const first_row = static_cast<const char*>(call.rows);
  Occurrences now(call), ahead(call);
  // Rows are fetched kAhead occurrences before they are used, of later samples, too.
  const auto fetch = [&](size_t count) {
    while (count) {
      if (ahead.from == ahead.to && !ahead.next()) return;
      for (; count && ahead.from < ahead.to; --count, ++ahead.from) {
        const int32_t which = call.inverse[ahead.from];
        if (SomeRows && (which < call.first_row || which >= call.last_row)) continue;
        for (size_t byte = 0; byte < row_bytes; byte += 64) {
          prefetch(first_row + which * row_bytes + byte);
        }
      }
    }
  };
  // So are gradients where other threads have those between: no hardware foresees such jumps.
  const bool jumps = call.pooled && call.last_field - call.first_field < call.fields;
  const auto fetch_gradients = [&](size_t sample) {
    if (sample >= call.samples) return;
    const T* const gradients = static_cast<const T*>(call.pooled) + sample * call.width;
    for (size_t f = call.first_field; f < call.last_field; ++f) {
      if (call.field[f].kind == PoolKind::sequence) continue;
      const char* const gradient = reinterpret_cast<const char*>(gradients + call.field[f].column);
      for (size_t byte = 0; byte < row_bytes; byte += 64) prefetch(gradient + byte);
    }
  };
  fetch(kAhead);
  for (size_t b = 0; now.next(); ++b) {
    if (jumps) fetch_gradients(b + kSamplesAhead);
    const int32_t* which = call.inverse + now.from;
    for (size_t f = call.first_field; f < call.last_field; ++f) {
      const PoolField& field = call.field[f];
      const size_t length = bag_length(call, b, field);
      fetch(length);
      if (field.kind == PoolKind::sequence) {
        const T* gradient = static_cast<const T*>(field.sequence) + b * field.max_length * dim;
        for (size_t l = 0; l < std::min(length, field.max_length); ++l) {
          add_gradient<SomeRows, T, D>(call, which + l, 1, T{1}, gradient + l * dim);
        }
      } else {
        const T* gradient = static_cast<const T*>(call.pooled) + b * call.width + field.column;
        add_gradient<SomeRows, T, D>(call, which, length, weight_of<T>(field.kind, length), gradient);
      }
      which += length;
    }
  }
}

template <class T, size_t D>
void scatter_call(const Pool& call) {
  if (call.some_rows) return scatter_samples<true, T, D>(call);
  scatter_samples<false, T, D>(call);
}

void pool(const Pool& call) {
  if (call.wide) return pool_samples<double, 0>(call);
  by_dim(call.dim, [&]<size_t D>() { pool_samples<float, D>(call); });
}

void scatter(const Pool& call) {
  if (call.wide) return scatter_call<double, 0>(call);
  by_dim(call.dim, [&]<size_t D>() { scatter_call<float, D>(call); });
}

}  // namespace

const Kernels KERNEL_SET = {KERNEL_NAME, step_rows, pool, scatter, to_half, from_half, round_half};

}  // namespace embedding
