// The arithmetic on rows, compiled once per instruction set; every set gives the same bytes.
//
// Plain loops of additions, products, quotients and roots, each rounded by itself (no contraction to
// fused products, no reordering), so the width of a vector register cannot be seen in a result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "options.hpp"

namespace embedding {

// One optimiser step on n distinct rows. Meanwhile what the next call will touch is fetched, so that
// memory works while the arithmetic does.
struct RowStep {
  const Options* options;
  char* rows;
  size_t stride;               // bytes from one row to the next
  const uint32_t* slots;       // [n]
  const uint64_t* ids;         // [n], of stochastic rounding
  const uint32_t* writes;      // [n], of stochastic rounding: each row's own count of steps, from 1
  const void* const* gradients;  // [n] pointers to [dim]
  const double* factors;       // [n] the step length: the learning rate, bias-corrected for Adam
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
  const int32_t* inverse;   // which distinct row each occurrence is; `rounds` entries an occurrence
  size_t rounds;
  size_t dim;
  size_t width;             // elements of a row of `pooled`
  void* pooled;             // [samples, width]
  void* rows;               // [distinct, dim]: values, or the sums to fill
  bool wide;                // float64
  bool plain_copy;          // one table, one id in every bag: a copy, as the reference does it
  size_t first_sample;      // the samples of this call (forward)
  size_t last_sample;
  int32_t first_row;        // the distinct rows of this call (backward)
  int32_t last_row;
};

struct Kernels {
  const char* name;
  void (*step_rows)(const RowStep&);
  void (*pool)(const Pool&);
  void (*scatter)(const Pool&);
  void (*load_half)(const Options&, const char* row, float* out);
  void (*store_half)(const Options&, uint64_t id, uint32_t writes, const float* values, char* row);
};

// The widest set this processor has, or the one chosen by name (for tests): scalar, avx2, avx512.
const Kernels& kernels();
bool choose_kernels(const char* name);

}  // namespace embedding
