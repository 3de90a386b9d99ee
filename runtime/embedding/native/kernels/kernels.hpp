// What a table is, the hashes and draws that its rows begin with, and the arithmetic on rows.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>

namespace embedding {

enum class OptimizerKind : int { sgd, adagrad, adagrad_row, adam, adam_row, ftrl };
enum class Initial : int { uniform, normal, constant };
enum class Eviction : int { none, lru };

// Adam's decays of the mean and of the mean square. Source: the defaults of torch.optim.Adam.
inline constexpr double kBeta1 = 0.9, kBeta2 = 0.999;

// Filled in by Python once, read by every kernel.
struct Options {
  uint64_t dim = 8;
  bool wide = false;  // float64, else float32

  OptimizerKind optimizer = OptimizerKind::sgd;
  double initial_accumulator = 0;
  double eps = 1e-10;
  double l1 = 0;
  double l2 = 0;

  uint64_t key = 0;  // stands for (seed, table)
  Initial initial = Initial::uniform;
  double initial_scale = 0;  // uniform: half of the range; normal: standard deviation; constant: value

  Eviction eviction = Eviction::none;
  uint64_t capacity_rows = 0;  // of this shard
  double admission_probability = 1;  // that an absent id gets a row
  uint32_t expire_after_steps = 0;  // 0: never

  size_t number_bytes() const { return wide ? 8 : 4; }
  size_t state_floats() const {
    switch (optimizer) {
      case OptimizerKind::sgd: return 0;
      case OptimizerKind::adagrad: return dim;
      case OptimizerKind::adagrad_row: return 1;
      case OptimizerKind::adam: return 2 * dim;
      case OptimizerKind::adam_row: return dim + 1;
      case OptimizerKind::ftrl: return l1 > 0 ? 2 * dim : dim;
    }
    return 0;
  }
  // Values first, the state right behind them.
  size_t state_offset() const { return dim * number_bytes(); }
  size_t row_bytes() const { return state_offset() + state_floats() * number_bytes(); }
};

// Hashing of ids: the same bits as runtime.data.ids.mix64 and runtime.embedding.batch_rows.shard_of.
inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;  // 2**64 / golden ratio

// A bijection that spreads every bit (the finaliser of splitmix64, Steele 2014).
inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline uint32_t shard_of(uint64_t hash, uint32_t shards) {
  return static_cast<uint32_t>((hash >> 32) % shards);
}

// 64 random bits: draw number `counter` of the stream that belongs to `id` under `key`.
inline uint64_t draw(uint64_t key, uint64_t id, uint64_t counter) {
  return mix64(mix64(id ^ key) + (counter + 1) * kGolden);
}

// Uniform in [0, 1) from the upper 53 bits.
inline double unit(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// Initial values: a pure function of (seed, table, id, element), as tests/oracles/reference/initial.py.
// Each element has its own stream of uniform draws.
class Draws {
 public:
  Draws(uint64_t key, uint64_t id, uint64_t element) : stream_(draw(key, id, element)) {}
  double unit() { return embedding::unit(mix64(stream_ + ++count_ * kGolden)); }
  // In (0, 1]: safe under a logarithm.
  double positive() { return 1.0 - unit(); }
  // Box and Muller (1958), the cosine branch.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(positive()));
    return radius * std::cos(2.0 * std::numbers::pi * unit());
  }
 private:
  uint64_t stream_;
  uint64_t count_ = 0;
};

template <class T>
void fill_initial(const Options& options, uint64_t id, T* values) {
  const uint64_t base = mix64(id ^ options.key);
  if (options.initial == Initial::uniform) {
    for (uint64_t j = 0; j < options.dim; ++j) {
      const uint64_t bits = mix64(base + (j + 1) * kGolden) >> 11;
      values[j] =
          static_cast<T>((static_cast<double>(bits) * 0x1p-52 - 1.0) * options.initial_scale);
    }
    return;
  }
  for (uint64_t j = 0; j < options.dim; ++j) {
    Draws draws(options.key, id, j);
    const double scale = options.initial_scale;
    values[j] = static_cast<T>(options.initial == Initial::normal ? scale * draws.normal() : scale);
  }
}

// The arithmetic, compiled once per instruction set; every set gives the same bytes: plain loops of
// additions, products, quotients and roots, each rounded by itself (no contraction to fused products,
// no reordering), so the width of a vector register cannot be seen in a result.

// One optimiser step on n distinct rows. Meanwhile what the next call will touch is fetched, so that
// memory works while the arithmetic does.
struct RowStep {
  const Options* options;
  char* rows;
  size_t stride;               // bytes from one row to the next
  const uint32_t* slots;       // [n]
  const void* const* gradients;  // [n] pointers to [dim]
  double factor;               // the step length: the learning rate, bias-corrected for Adam
  size_t n;
  const uint32_t* next_slots;          // [next_n]
  const void* const* next_gradients;   // [next_n] where they begin; null: no need to fetch them
  size_t next_n;
};

enum class PoolKind : int { sum, mean, sqrtn, sequence };

struct PoolField {
  PoolKind kind;
  size_t bag;          // its place among the fields of a sample
  size_t column;       // of its first element in `pooled`
  size_t max_length;   // sequence: places L
  void* sequence;      // sequence: [samples, L, dim]
  uint8_t* mask;       // sequence: [samples, L], may be null
};

// Bags of one table: rows -> vectors, or gradients of vectors -> gradients of rows.
struct Pool {
  size_t samples;
  size_t bags;              // of a sample, those of other tables with them
  size_t fields;
  const PoolField* field;   // [fields] of this table
  const int64_t* offsets;   // [samples * bags + 1] bag bounds, null: one id in every bag
  const int32_t* inverse;   // which distinct row each occurrence is
  size_t dim;
  size_t width;             // elements of a row of `pooled`
  void* pooled;             // [samples, width]
  void* rows;               // [distinct, dim]: values, or the sums to fill
  bool wide;                // float64
  bool plain_copy;          // one table, one id in every bag: a copy, as the reference does it
  size_t first_sample;      // the samples of this call (forward)
  size_t last_sample;
  size_t first_field;       // the fields of this call (backward)
  size_t last_field;
  bool some_rows;           // backward: only these distinct rows
  int32_t first_row;
  int32_t last_row;
};

// Rows that travel as float16 with a scale for each row, as runtime/embedding/half.py says.
struct HalfRows {
  size_t n;               // rows
  const int64_t* sizes;   // [n] numbers of each
  bool wide;              // float64
  void* numbers;          // of all rows, side by side
  void* rounded;          // as they are behind the way; of round_half
  int16_t* scales;        // [n]
  uint16_t* halves;       // one for each number
};

struct Kernels {
  const char* name;
  void (*step_rows)(const RowStep&);
  void (*pool)(const Pool&);
  void (*scatter)(const Pool&);  // adds to rows that are zeros at first
  void (*to_half)(const HalfRows&);     // numbers -> scales, halves
  void (*from_half)(const HalfRows&);   // the way back
  void (*round_half)(const HalfRows&);  // both at once: numbers -> rounded
};

// On other processors than x86 only the first is there.
extern const Kernels kernels_scalar, kernels_avx2, kernels_avx512;

// The widest set this processor has, or the one chosen by name (for tests): scalar, avx2, avx512.
const Kernels& kernels();
bool choose_kernels(const char* name);

}  // namespace embedding
