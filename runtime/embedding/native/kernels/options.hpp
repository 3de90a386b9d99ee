// What a table is: filled in by Python once, read by every kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embedding {

enum class Storage : int { f32, f64, f16, bf16 };
enum class OptimizerKind : int { sgd, momentum, adagrad, adagrad_row, adam, adam_row, ftrl };
enum class Initial : int { uniform, normal, gamma, poisson, constant };
enum class Eviction : int { none, lru, clock };
enum class Admission : int { all, probability, frequency };

struct Options {
  uint64_t dim = 8;
  Storage storage = Storage::f32;

  OptimizerKind optimizer = OptimizerKind::sgd;
  double initial_accumulator = 0;
  double eps = 1e-10;
  double beta1 = 0.9;
  double beta2 = 0.999;
  bool row_bias_correction = false;
  double weight_decay = 0;
  double momentum = 0;
  double l1 = 0;
  double l2 = 0;
  double ftrl_beta = 1;
  double weight_bound = 0;  // 0: none

  uint64_t key = 0;  // stands for (seed, table)
  Initial initial = Initial::uniform;
  double initial_a = 0;  // uniform: scale; normal: mean; gamma: shape; poisson: rate; constant: value
  double initial_b = 0;  // normal: standard deviation; gamma: scale

  Eviction eviction = Eviction::none;
  uint64_t capacity_rows = 0;  // of this shard
  Admission admission = Admission::all;
  double admission_probability = 1;
  uint32_t admission_sightings = 1;
  uint64_t admission_counters = 0;
  uint32_t expire_after_steps = 0;  // 0: never
  bool track_changes = false;

  bool wide() const { return storage == Storage::f64; }
  bool half() const { return storage == Storage::f16 || storage == Storage::bf16; }
  size_t compute_bytes() const { return wide() ? 8 : 4; }
  size_t value_bytes() const { return half() ? 2 : compute_bytes(); }
  size_t state_floats() const {
    switch (optimizer) {
      case OptimizerKind::sgd: return 0;
      case OptimizerKind::momentum: return dim;
      case OptimizerKind::adagrad: return dim;
      case OptimizerKind::adagrad_row: return 1;
      case OptimizerKind::adam: return 2 * dim;
      case OptimizerKind::adam_row: return dim + 1;
      case OptimizerKind::ftrl: return 2 * dim;
    }
    return 0;
  }
  // Values first, the state right behind them (at a multiple of its own size).
  size_t state_offset() const {
    const size_t unit = compute_bytes();
    return (dim * value_bytes() + unit - 1) / unit * unit;
  }
  size_t row_bytes() const { return state_offset() + state_floats() * compute_bytes(); }
};

}  // namespace embedding
