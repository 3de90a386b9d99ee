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

// `next`: the rows of the call after this one, to be fetched meanwhile.
void Table::step_rows(const Touched& now, const Touched& next, int64_t step, double lr) {
  uint32_t writes[kBlock];
  double factors[kBlock];
  const bool by_row = options_.row_bias_correction;
  const double common = by_row ? 0 : factor(0, step, lr);
  for (size_t i = 0; i < now.count; ++i) {
    writes[i] = records_.count_write(now.slots[i]);
    factors[i] = by_row ? factor(writes[i], step, lr) : common;
  }
  kernels().step_rows({&options_, slab_.data(), row_bytes_, now.slots, now.ids, writes,
                       now.gradients, factors, now.count, next.slots, next.count});
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
  const int64_t others = Records::writes_between(part.writes[i], records_.writes(slot));
  ++missed.writes[std::min<int64_t>(others, 63)];
  return true;
}

// Adds gradients of the part from `from` on, until `touched` has a block more or `to` is reached;
// returns where it stopped.
size_t Table::collect(const Part& part, size_t from, size_t to, Collected& touched,
                      Missed& missed) const {
  const size_t enough = std::min(touched.count + kBlock, touched.ids.size());
  for (; from < to && touched.count < enough; ++from) {
    if (from + 2 * kAhead < to) prefetch_record(part.handles[from + 2 * kAhead]);
    if (!still_there(part, from, missed)) continue;
    touched.add(part.ids[from], static_cast<uint32_t>(part.handles[from]),
                part.gradients + from * value_bytes_);
  }
  return from;
}

void Table::push(const std::vector<Part>& parts, int64_t step, double lr, int64_t* staleness) {
  const std::scoped_lock hold(lock_);
  for (const Part& part : parts) help_to_copy(part.n);
  Missed all;
  if (parts.size() == 1) {
    std::mutex adding;
    share(parts[0].n, kLeast, [&](size_t from, size_t to) {
      Collected now(kBlock), next(kBlock);
      Missed missed;
      for (size_t i = from; i < std::min(from + 2 * kAhead, to); ++i) {
        prefetch_record(parts[0].handles[i]);
      }
      from = collect(parts[0], from, to, next, missed);
      while (next.count) {
        std::swap(now, next);
        next.count = 0;
        from = collect(parts[0], from, to, next, missed);
        step_rows(now.all(), next.all(), step, lr);
      }
      const std::scoped_lock one(adding);
      all.add(missed);
    });
  } else {
    size_t total = 0;
    for (const Part& part : parts) total += part.n;
    Collected touched(total);
    for (const Part& part : parts) {
      for (size_t at = 0; at < part.n;) at = collect(part, at, part.n, touched, all);
    }
    if (options_.wide()) {
      push_merged<double>(touched.all(), step, lr);
    } else {
      push_merged<float>(touched.all(), step, lr);
    }
  }
  counters_.gradients_not_admitted += all.not_admitted;
  counters_.gradients_evicted += all.evicted;
  for (size_t missed = 0; missed < 64; ++missed) staleness[missed] += all.writes[missed];
}

// Gradients of one row from several parts become one, summed from 0 in the order of the parts.
template <class T>
void Table::push_merged(const Touched& touched, int64_t step, double lr) {
  static thread_local std::vector<T> kept;
  const size_t dim = options_.dim;
  std::vector<int32_t> inverse(touched.count);
  const Distinct distinct = merge_duplicates(touched.ids, touched.count, 1, inverse.data());
  const size_t rows = distinct.ids.size();
  std::vector<uint32_t> slots(rows);
  std::vector<const void*> gradients(rows);
  std::vector<T>& sums = kept;
  sums.assign(rows * dim, T{0});
  for (size_t i = 0; i < touched.count; ++i) {
    const auto to = static_cast<size_t>(inverse[i]);
    const auto* gradient = static_cast<const T*>(touched.gradients[i]);
    T* __restrict sum = &sums[to * dim];
    for (size_t j = 0; j < dim; ++j) sum[j] += gradient[j];
    slots[to] = touched.slots[i];
    gradients[to] = sum;
  }
  const Touched merged{distinct.ids.data(), slots.data(), gradients.data(), rows};
  share(rows, kLeast, [&](size_t from, size_t to) {
    for (size_t start = from; start < to; start += kBlock) {
      const size_t end = std::min(start + kBlock, to), next = std::min(end + kBlock, to);
      step_rows(merged.part(start, end), merged.part(end, next), step, lr);
    }
  });
}

}  // namespace embedding
