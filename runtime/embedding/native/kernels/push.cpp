// Gradients to rows: which still have one, their sums, and the optimiser step.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "table.hpp"

namespace embedding {

// Rows about to take a step, and their gradients, one place for each.
struct Table::Collected {
  explicit Collected(size_t most) : ids(most), slots(most), gradients(most) {}
  void start(size_t most) {
    count = 0;
    if (ids.size() >= most) return;
    ids.resize(most);
    slots.resize(most);
    gradients.resize(most);
  }
  void add(uint64_t id, uint32_t slot, const void* gradient) {
    ids[count] = id;
    slots[count] = slot;
    gradients[count++] = gradient;
  }
  std::vector<uint64_t> ids;
  std::vector<uint32_t> slots;
  std::vector<const void*> gradients;
  size_t count = 0;
};

struct Table::Missed {  // of a push
  uint64_t not_admitted = 0, evicted = 0;
  int64_t writes[64] = {};
  void add(const Missed& other) {
    not_admitted += other.not_admitted;
    evicted += other.evicted;
    for (size_t i = 0; i < 64; ++i) writes[i] += other.writes[i];
  }
};

namespace {

constexpr size_t kBlock = 16;  // rows of one call of an optimiser kernel

// The gradients of each row hang in a chain, in their own order; rows stand in the order of first
// appearance. A row is known by its slot, so that finding its chain needs no hash of an id and no look
// at one. Memory is kept from push to push.
class Chains {
 public:
  static constexpr uint32_t kEnd = 0xFFFFFFFFu;

  void link(const uint32_t* slots, size_t n) {
    size_t size = 1024;
    while (size < 2 * n) size *= 2;
    table_.assign(size, kEnd);
    const int shift = 64 - __builtin_ctzll(size);
    next_.resize(std::max(next_.size(), n));
    rows_.clear();
    for (uint32_t i = 0; i < n; ++i) {
      next_[i] = kEnd;
      size_t at = uint64_t{slots[i]} * kGolden >> shift;
      while (table_[at] != kEnd && slots[rows_[table_[at]].first] != slots[i]) {
        at = at + 1 == size ? 0 : at + 1;
      }
      if (table_[at] == kEnd) {
        table_[at] = static_cast<uint32_t>(rows_.size());
        rows_.push_back({i, i});
      } else {
        Row& row = rows_[table_[at]];
        next_[row.last] = i;
        row.last = i;
      }
    }
  }

  size_t size() const { return rows_.size(); }
  uint32_t first(size_t row) const { return rows_[row].first; }
  uint32_t next(uint32_t gradient) const { return next_[gradient]; }

 private:
  struct Row {
    uint32_t first, last;
  };
  std::vector<uint32_t> table_;  // numbers of rows, by slot
  std::vector<uint32_t> next_;
  std::vector<Row> rows_;
};

}  // namespace

double Table::factor(int64_t step, double lr) const {
  const OptimizerKind kind = options_.optimizer;
  if (kind != OptimizerKind::adam && kind != OptimizerKind::adam_row) return lr;
  const auto count = static_cast<double>(step);
  const double rest1 = 1 - std::pow(kBeta1, count);
  const double rest2 = 1 - std::pow(kBeta2, count);
  if (options_.wide) return lr * std::sqrt(rest2) / rest1;
  return static_cast<float>(lr) * std::sqrt(static_cast<float>(rest2)) / static_cast<float>(rest1);
}

// What the step after this one will touch is fetched: rows, and gradients that do not lie in order.
void Table::step_rows(const Collected& now, const Collected& ahead, bool in_order, int64_t step,
                      double lr) {
  records_.count_writes(now.slots.data(), now.count);
  kernels().step_rows({&options_, slab_.data(), row_bytes_, now.slots.data(), now.gradients.data(),
                       factor(step, lr), now.count, ahead.slots.data(),
                       in_order ? nullptr : ahead.gradients.data(), ahead.count});
}

// Adds gradients of the part from `from` on whose rows are where the lookup found them, until `touched`
// has a block more or `to` is reached; returns where it stopped. The others are counted as dropped.
size_t Table::collect(const Part& given, size_t from, size_t to, Collected& touched,
                      Missed& missed) const {
  const Part part = given;  // this and the next ones: so that the loop holds them in registers
  const Records::Reader records = records_.reader();
  const size_t used = used_, value_bytes = value_bytes_;
  const bool expire = records_.stamped();
  size_t count = touched.count;
  const size_t enough = std::min(count + kBlock, touched.ids.size());
  uint64_t* const ids = touched.ids.data();
  uint32_t* const slots = touched.slots.data();
  const void** const gradients = touched.gradients.data();
  for (; from < to && count < enough; ++from) {
    if (from + 2 * kAhead < to) prefetch_record(part, from + 2 * kAhead, records);
    const int64_t handle = part.handles[from];
    if (handle == kAbsent) {
      ++missed.not_admitted;
      continue;
    }
    const auto slot = static_cast<uint32_t>(handle);
    const uint64_t id = part.ids[from];
    const uint64_t counters = slot < used ? records.counters(slot) : 0;
    if (slot >= used || records.id(slot) != id || handle_of(slot, counters) != handle ||
        (expire && records_.expired(slot, latest_step_))) {
      ++missed.evicted;
      continue;
    }
    const uint32_t writes = Records::writes_in(counters);
    const int64_t others = Records::writes_between(part.writes[from], writes);
    ++missed.writes[std::min<int64_t>(others, 63)];
    ids[count] = id;
    slots[count] = slot;
    gradients[count++] = part.numbers + from * value_bytes;
  }
  touched.count = count;
  return from;
}

void Table::push(const std::vector<Part>& parts, int64_t step, double lr, int64_t* staleness) {
  const std::scoped_lock hold(lock_);
  for (const Part& part : parts) help_to_copy(part.n);
  Missed all;
  if (parts.size() == 1) {
    push_one(parts[0], step, lr, all);
  } else if (options_.wide) {
    push_merged<double>(parts, step, lr, all);
  } else {
    push_merged<float>(parts, step, lr, all);
  }
  counters_.gradients_not_admitted += all.not_admitted;
  counters_.gradients_evicted += all.evicted;
  for (size_t missed = 0; missed < 64; ++missed) staleness[missed] += all.writes[missed];
}

void Table::push_one(const Part& part, int64_t step, double lr, Missed& all) {
  std::mutex adding;
  share(part.n, kLeast, [&](size_t from, size_t to) {
    Collected now(kBlock), next(kBlock);
    Missed missed;
    for (size_t i = from; i < std::min(from + 2 * kAhead, to); ++i) {
      prefetch_record(part, i, records_.reader());
    }
    from = collect(part, from, to, next, missed);
    while (next.count) {
      std::swap(now, next);
      next.count = 0;
      from = collect(part, from, to, next, missed);
      step_rows(now, next, true, step, lr);
    }
    const std::scoped_lock one(adding);
    all.add(missed);
  });
}

// Gradients of one row from several parts become one, summed from 0 in the order of the parts.
template <class T>
void Table::push_merged(const std::vector<Part>& parts, int64_t step, double lr, Missed& missed) {
  static thread_local Collected kept(0);
  static thread_local Chains kept_chains;
  Collected& touched = kept;  // also for the threads that share the work
  Chains& chains = kept_chains;
  size_t total = 0;
  for (const Part& part : parts) total += part.n;
  touched.start(total);
  for (const Part& part : parts) {
    for (size_t at = 0; at < part.n;) at = collect(part, at, part.n, touched, missed);
  }
  chains.link(touched.slots.data(), touched.count);
  share(chains.size(), kLeast, [&](size_t from, size_t to) {
    const size_t dim = options_.dim;
    Collected now(kBlock), next(kBlock);
    std::vector<T> sums(kBlock * dim);
    while (from < to) {
      now.count = 0;
      for (; from < to && now.count < kBlock; ++from) {
        T* __restrict sum = &sums[now.count * dim];
        std::fill(sum, sum + dim, T{0});
        const uint32_t first = chains.first(from);
        for (uint32_t at = first; at != Chains::kEnd; at = chains.next(at)) {
          const T* gradient = static_cast<const T*>(touched.gradients[at]);
          for (size_t j = 0; j < dim; ++j) sum[j] += gradient[j];
        }
        now.add(touched.ids[first], touched.slots[first], sum);
      }
      next.count = 0;
      for (size_t row = from; row < to && next.count < kBlock; ++row) {
        const uint32_t first = chains.first(row);
        next.add(touched.ids[first], touched.slots[first], touched.gradients[first]);
      }
      step_rows(now, next, false, step, lr);
    }
  });
}

}  // namespace embedding
