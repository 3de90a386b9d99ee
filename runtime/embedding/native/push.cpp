// Gradients to rows: which still have one, their sums, and the optimiser step.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "dedup.hpp"
#include "table.hpp"
#include "threads.hpp"

namespace embedding {

namespace {

constexpr size_t kBlock = 16;  // rows of one call of an optimiser kernel

}  // namespace

double Table::factor(uint32_t writes, int64_t step, double lr) const {
  const OptimizerKind kind = options_.optimizer;
  if (kind != OptimizerKind::adam && kind != OptimizerKind::adam_row) return lr;
  const auto count = static_cast<double>(options_.row_bias_correction ? writes : step);
  const double rest1 = 1 - std::pow(options_.beta1, count);
  const double rest2 = 1 - std::pow(options_.beta2, count);
  if (options_.wide()) return lr * std::sqrt(rest2) / rest1;
  return static_cast<float>(lr) * std::sqrt(static_cast<float>(rest2)) / static_cast<float>(rest1);
}

void Table::step_rows(const Touched& touched, size_t from, size_t to, int64_t step, double lr) {
  uint32_t writes[kBlock];
  double factors[kBlock];
  const bool by_row = options_.row_bias_correction;
  const double common = by_row ? 0 : factor(0, step, lr);
  const Kernels& run = kernels();
  for (size_t start = from; start < to; start += kBlock) {
    const size_t count = std::min(kBlock, to - start);
    for (size_t i = 0; i < count; ++i) {
      writes[i] = records_.count_write(touched.slots[start + i]);
      factors[i] = by_row ? factor(writes[i], step, lr) : common;
    }
    run.step_rows({&options_, slab_.data(), row_bytes_, &touched.slots[start], &touched.ids[start],
                   writes, &touched.gradients[start], factors, count});
  }
}

// Whether the row of gradient i of a part is where the lookup found it; else counts it as dropped.
inline bool Table::still_there(const Part& part, size_t i, Missed& missed) const {
  const int64_t handle = part.handles[i];
  if (handle == kAbsent) {
    ++missed.not_admitted;
    return false;
  }
  const auto slot = static_cast<uint32_t>(handle);
  if (slot >= used_ || records_.id(slot) != part.ids[i] || handle_of(slot) != handle) {
    ++missed.evicted;
    return false;
  }
  ++missed.writes[std::clamp<int64_t>(records_.writes(slot) - part.writes[i], 0, 63)];
  return true;
}

// Calls full(touched) whenever a block of rows of the part is ready, and once at the end.
template <class Full>
void Table::collect(const Part& part, size_t from, size_t to, Touched& touched, Missed& missed,
                    Full full) const {
  for (size_t i = from; i < std::min(from + 2 * kAhead, to); ++i) prefetch_handle(part.handles[i]);
  for (size_t i = from; i < to; ++i) {
    if (i + 2 * kAhead < to) prefetch_handle(part.handles[i + 2 * kAhead]);
    if (!still_there(part, i, missed)) continue;
    touched.add(part.ids[i], static_cast<uint32_t>(part.handles[i]),
                part.gradients + i * value_bytes_);
    if (touched.full()) full(touched);
  }
}

void Table::push(const std::vector<Part>& parts, int64_t step, double lr, int64_t* staleness) {
  const std::scoped_lock hold(lock_);
  Missed all;
  if (parts.size() == 1) {
    std::mutex adding;
    share(parts[0].n, kLeast, [&](size_t from, size_t to) {
      Touched touched(kBlock);
      Missed missed;
      collect(parts[0], from, to, touched, missed, [&](Touched& block) {
        step_rows(block, 0, block.count, step, lr);
        block.count = 0;
      });
      step_rows(touched, 0, touched.count, step, lr);
      const std::scoped_lock one(adding);
      all.add(missed);
    });
  } else {
    size_t total = 0;
    for (const Part& part : parts) total += part.n;
    Touched touched(total);
    for (const Part& part : parts) collect(part, 0, part.n, touched, all, [](Touched&) {});
    options_.wide() ? merge<double>(touched) : merge<float>(touched);
    share(touched.count, kLeast, [&](size_t from, size_t to) {
      step_rows(touched, from, to, step, lr);
    });
  }
  counters_.gradients_not_admitted += all.not_admitted;
  counters_.gradients_evicted += all.evicted;
  for (size_t missed = 0; missed < 64; ++missed) staleness[missed] += all.writes[missed];
}

// Gradients of one row from several parts become one, summed from 0 in the order of the parts.
template <class T>
void Table::merge(Touched& touched) const {
  static thread_local std::vector<T> kept;
  const size_t n = touched.count, dim = options_.dim;
  std::vector<int32_t> inverse(n);
  const Distinct distinct = merge_duplicates(touched.ids.data(), n, 1, inverse.data());
  Touched one(distinct.ids.size());
  one.ids = distinct.ids;
  one.count = distinct.ids.size();
  std::vector<T>& sums = kept;
  sums.assign(one.count * dim, T{0});
  for (size_t i = 0; i < n; ++i) {
    const auto to = static_cast<size_t>(inverse[i]);
    const auto* gradient = static_cast<const T*>(touched.gradients[i]);
    T* __restrict sum = &sums[to * dim];
    for (size_t j = 0; j < dim; ++j) sum[j] += gradient[j];
    one.slots[to] = touched.slots[i];
    one.gradients[to] = sum;
  }
  touched = std::move(one);
}

}  // namespace embedding
