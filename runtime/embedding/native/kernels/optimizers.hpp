// One optimiser step on one row, in torch's formulas, in the order of operations of the reference.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "half.hpp"
#include "kernels.hpp"
#include "prefetch.hpp"

namespace {

using embedding::OptimizerKind;
using embedding::RowStep;

template <class T>
struct Rule {
  explicit Rule(const Options& o)
      : eps(static_cast<T>(o.eps)),
        rest1(static_cast<T>(1 - o.beta1)),
        rest2(static_cast<T>(1 - o.beta2)),
        decay(static_cast<T>(o.weight_decay)),
        momentum(static_cast<T>(o.momentum)),
        l1(static_cast<T>(o.l1)),
        l2(static_cast<T>(o.l2)),
        beta(static_cast<T>(o.ftrl_beta)),
        bound(static_cast<T>(o.weight_bound)) {}
  T eps, rest1, rest2, decay, momentum, l1, l2, beta, bound;
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
    if (rule.decay == 0) {
      for (size_t j = 0; j < dim; ++j) v[j] -= lr * g[j];
    } else {
      for (size_t j = 0; j < dim; ++j) v[j] -= lr * (g[j] + rule.decay * v[j]);
    }
  } else if constexpr (K == OptimizerKind::momentum) {
    for (size_t j = 0; j < dim; ++j) {
      s[j] = rule.momentum * s[j] + (g[j] + rule.decay * v[j]);
      v[j] -= lr * s[j];
    }
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
    // FTRL-proximal (McMahan et al. 2013, Algorithm 1), z then n.
    T* __restrict n = s + dim;
    for (size_t j = 0; j < dim; ++j) {
      const T grown = n[j] + g[j] * g[j];
      const T sigma = (std::sqrt(grown) - std::sqrt(n[j])) / lr;
      s[j] += g[j] - sigma * v[j];
      n[j] = grown;
      const T sign = s[j] < 0 ? T{-1} : T{1};
      const T excess = s[j] * sign - rule.l1;
      v[j] = excess <= 0 ? T{0} : -(sign * excess) / ((rule.beta + std::sqrt(grown)) / lr + rule.l2);
    }
  }
  if (rule.bound > 0) {
    for (size_t j = 0; j < dim; ++j) {
      v[j] = v[j] > rule.bound ? rule.bound : v[j] < -rule.bound ? -rule.bound : v[j];
    }
  }
}

template <OptimizerKind K, class T, size_t D, bool Half>
void step_all(const RowStep& call) {
  const Options& options = *call.options;
  const Rule<T> rule(options);
  const size_t dim = D ? D : options.dim;
  T small[D ? 3 * D : 1];
  std::vector<T> large(D ? 0 : 3 * dim + 1);
  T* scratch = D ? small : large.data();
  [[maybe_unused]] T* values = scratch + 2 * dim;  // of a row that is stored in 16 bits
  for (size_t i = 0; i < call.n; ++i) {
    if (i < call.next_n) {
      if (call.next_gradients) embedding::prefetch(call.next_gradients[i]);
      embedding::prefetch_span(call.rows + call.next_slots[i] * call.stride, call.stride);
    }
    char* row = call.rows + call.slots[i] * call.stride;
    auto* state = reinterpret_cast<T*>(row + options.state_offset());
    const auto* gradient = static_cast<const T*>(call.gradients[i]);
    const T lr = static_cast<T>(call.factors[i]);
    if constexpr (Half) {
      load_values<D>(options, row, values);
      step_row<K, T, D>(rule, values, state, gradient, dim, lr, scratch);
      store_values<D>(options, call.ids[i], call.writes[i], values, row);
    } else {
      step_row<K, T, D>(rule, reinterpret_cast<T*>(row), state, gradient, dim, lr, scratch);
    }
  }
}

template <class T, size_t D, bool Half>
void step_kind(const RowStep& call) {
  switch (call.options->optimizer) {
    case OptimizerKind::sgd: return step_all<OptimizerKind::sgd, T, D, Half>(call);
    case OptimizerKind::momentum: return step_all<OptimizerKind::momentum, T, D, Half>(call);
    case OptimizerKind::adagrad: return step_all<OptimizerKind::adagrad, T, D, Half>(call);
    case OptimizerKind::adagrad_row: return step_all<OptimizerKind::adagrad_row, T, D, Half>(call);
    case OptimizerKind::adam: return step_all<OptimizerKind::adam, T, D, Half>(call);
    case OptimizerKind::adam_row: return step_all<OptimizerKind::adam_row, T, D, Half>(call);
    case OptimizerKind::ftrl: return step_all<OptimizerKind::ftrl, T, D, Half>(call);
  }
}

template <bool Half>
void step_floats(const RowStep& call) {
  switch (call.options->dim) {
    case 8: return step_kind<float, 8, Half>(call);
    case 16: return step_kind<float, 16, Half>(call);
    case 32: return step_kind<float, 32, Half>(call);
    case 64: return step_kind<float, 64, Half>(call);
    case 128: return step_kind<float, 128, Half>(call);
    default: return step_kind<float, 0, Half>(call);
  }
}

void step_rows(const RowStep& call) {
  if (call.options->wide()) return step_kind<double, 0, false>(call);
  if (call.options->half()) return step_floats<true>(call);
  return step_floats<false>(call);
}

}  // namespace
