#include "table.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "dedup.hpp"
#include "initial.hpp"
#include "threads.hpp"

namespace embedding {

namespace {

constexpr size_t kAhead = 16;             // ids between one stage of a lookup and the next
constexpr size_t kRing = 64;              // more than all stages span
constexpr size_t kLeast = 4096;           // ids that are worth a second thread
constexpr size_t kBlock = 16;             // rows of one call of an optimiser kernel
constexpr uint64_t kMostSlots = 0xFFFFFFF0u;

uint64_t most_rows_of(const Options& options) {
  if (options.capacity_rows) return std::min(options.capacity_rows, kMostSlots);
  return std::min<uint64_t>(kMostSlots, machine_bytes() / options.row_bytes());
}

// Copies of a multiple of 64 bytes are the common case; a call of memcpy costs more than the copy.
inline void copy_row(char* to, const char* from, size_t bytes) {
  if (bytes == 64) {
    std::memcpy(to, from, 64);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

Table::Table(const Options& options)
    : options_(options),
      row_bytes_(options.row_bytes()),
      value_bytes_(options.dim * options.compute_bytes()),
      most_rows_(most_rows_of(options)),
      index_(options.capacity_rows ? most_rows_ : 1024),
      records_(options_, most_rows_),
      slab_(most_rows_ * row_bytes_),
      gate_(options_) {
  if ((options.eviction == Eviction::none) != (options.capacity_rows == 0)) {
    throw std::invalid_argument("capacity_rows and an eviction policy go together");
  }
}

// Calls visit(i, hash, slot) for each id in order. Stages run ahead of it, one id at a time (bursts
// of prefetches are dropped): the bucket, then record and row, then the neighbours in the LRU list.
template <class Visit>
void Table::walk(const uint64_t* ids, size_t n, Visit visit) const {
  uint64_t hashes[kRing];
  uint32_t slots[kRing];
  const size_t row_bytes = options_.dim * options_.value_bytes();
  const bool linked = options_.eviction == Eviction::lru;
  const auto hash_one = [&](size_t i) {
    if (i >= n) return;
    const uint64_t hash = hashes[i % kRing] = mix64(ids[i]);
    index_.prefetch(Index::tag_of(hash));
  };
  const auto guess_one = [&](size_t i) {
    if (i >= n) return;
    const uint32_t slot = slots[i % kRing] = index_.guess(Index::tag_of(hashes[i % kRing]));
    if (slot == kNoSlot) return;
    records_.prefetch(slot);
    prefetch_row(slot, row_bytes);
  };
  const auto link_one = [&](size_t i) {
    if (i >= n || slots[i % kRing] == kNoSlot) return;
    const uint32_t newer = records_.newer(slots[i % kRing]);
    const uint32_t older = records_.older(slots[i % kRing]);
    if (newer != kNoSlot) records_.prefetch(newer);
    if (older != kNoSlot) records_.prefetch(older);
  };
  for (size_t i = 0; i < 3 * kAhead; ++i) hash_one(i);
  for (size_t i = 0; i < 2 * kAhead; ++i) guess_one(i);
  if (linked) {
    for (size_t i = 0; i < kAhead; ++i) link_one(i);
  }
  for (size_t i = 0; i < n; ++i) {
    hash_one(i + 3 * kAhead);
    guess_one(i + 2 * kAhead);
    if (linked) link_one(i + kAhead);
    const uint64_t hash = hashes[i % kRing];
    uint32_t slot = slots[i % kRing];
    if (slot == kNoSlot || records_.id(slot) != ids[i]) slot = find(ids[i], hash);
    visit(i, hash, slot);
  }
}

uint32_t Table::find(uint64_t id, uint64_t hash) const {
  return index_.find(Index::tag_of(hash), [&](uint32_t slot) { return records_.id(slot) == id; });
}

uint32_t Table::now(int64_t step) {
  if (step > int64_t{latest_step_}) latest_step_ = static_cast<uint32_t>(step);
  return latest_step_;
}

bool Table::expired(uint32_t slot, uint32_t step) const {
  return records_.stamped() && step > options_.expire_after_steps &&
         records_.stamp(slot) < step - options_.expire_after_steps;
}

void Table::use(uint32_t slot, uint32_t step) {
  if (options_.eviction == Eviction::lru) lru_.touch(records_, slot);
  if (options_.eviction == Eviction::clock) records_.add(slot, Records::kUsed);
  if (records_.stamped()) records_.set_stamp(slot, step);
}

void Table::start_row(uint32_t slot, uint64_t id, uint32_t step) {
  records_.renew(slot, id);
  if (records_.stamped()) records_.set_stamp(slot, step);
  char* to = row(slot);
  if (options_.wide()) {
    fill_initial(options_, id, reinterpret_cast<double*>(to));
  } else if (options_.half()) {
    std::vector<float> values(options_.dim);
    fill_initial(options_, id, values.data());
    kernels().store_half(options_, id, 0, values.data(), to);
  } else {
    fill_initial(options_, id, reinterpret_cast<float*>(to));
  }
  char* state = to + options_.state_offset();
  for (size_t k = 0; k < options_.state_floats(); ++k) {
    if (options_.wide()) {
      reinterpret_cast<double*>(state)[k] = options_.initial_accumulator;
    } else {
      reinterpret_cast<float*>(state)[k] = static_cast<float>(options_.initial_accumulator);
    }
  }
  ++counters_.created;
}

void Table::remove(uint32_t slot) {
  const uint64_t id = records_.id(slot);
  index_.erase(Index::tag_of(mix64(id)), slot);
  if (options_.eviction == Eviction::lru) lru_.remove(records_, slot);
  records_.set_id(slot, kNoId);
  free_.push_back(slot);
  --live_;
  if (options_.track_changes) removed_.push_back(id);
}

void Table::evict_one() {
  remove(options_.eviction == Eviction::lru ? lru_.oldest() : clock_.victim(records_, used_));
  ++counters_.evicted;
}

// A few slots for each row created: memory of expired rows comes back without a pause.
void Table::sweep_expired(uint32_t step) {
  uint32_t hand = sweep_.hand();
  for (int i = 0; i < 4 && used_ > 0; ++i, ++hand) {
    if (hand >= used_) hand = 0;
    if (records_.id(hand) != kNoId && expired(hand, step)) {
      remove(hand);
      ++counters_.expired;
    }
  }
  sweep_.set_hand(hand);
}

uint32_t Table::create(uint64_t id, uint64_t hash, uint32_t step) {
  if (records_.stamped()) sweep_expired(step);
  if (options_.eviction != Eviction::none && live_ >= most_rows_) evict_one();
  uint32_t slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    if (used_ >= most_rows_) throw std::bad_alloc();
    slot = used_;
    records_.reserve(slot + 1);
    slab_.grow((slot + 1) * row_bytes_);
    ++used_;
  }
  start_row(slot, id, step);
  index_.insert(Index::tag_of(hash), slot);
  if (options_.eviction == Eviction::lru) lru_.push(records_, slot);
  ++live_;
  return slot;
}

// The slot after a training lookup of `id`, which lies in `slot` if anywhere; kNoSlot if refused.
uint32_t Table::obtain(uint64_t id, uint64_t hash, uint32_t slot, uint32_t step) {
  if (slot != kNoSlot) {
    if (expired(slot, step)) {
      start_row(slot, id, step);
      ++counters_.expired;
    }
    use(slot, step);
    return slot;
  }
  if (!gate_.admits(id, step)) {
    ++counters_.not_admitted;
    return kNoSlot;
  }
  return create(id, hash, step);
}

void Table::copy_values(uint32_t slot, char* out) const {
  if (options_.half()) {
    kernels().load_half(options_, row(slot), reinterpret_cast<float*>(out));
  } else {
    copy_row(out, row(slot), value_bytes_);
  }
}

void Table::copy_initial(uint64_t id, char* out) const {
  if (options_.wide()) {
    fill_initial(options_, id, reinterpret_cast<double*>(out));
    return;
  }
  auto* values = reinterpret_cast<float*>(out);
  fill_initial(options_, id, values);
  if (options_.half()) {
    std::vector<char> stored(options_.state_offset());
    kernels().store_half(options_, id, 0, values, stored.data());
    kernels().load_half(options_, stored.data(), values);
  }
}

// What a read leaves for id i, whose row lies in `slot` if anywhere.
inline void Table::put(size_t i, uint64_t id, uint32_t slot, int64_t* handles, char* values,
                       int64_t* writes) const {
  char* out = values + i * value_bytes_;
  if (slot == kNoSlot) {
    handles[i] = kAbsent;
    writes[i] = 0;
    copy_initial(id, out);
  } else {
    handles[i] = handle_of(slot);
    writes[i] = records_.writes(slot);
    copy_values(slot, out);
  }
}

void Table::read(const uint64_t* ids, size_t n, bool create, int64_t step, int64_t* handles,
                 char* values, int64_t* writes) {
  const std::scoped_lock hold(lock_);
  const uint32_t at = create ? now(step) : latest_step_;  // reading ahead is no use of the table
  const bool ordered = options_.eviction != Eviction::none || records_.stamped();
  if (create && ordered) {
    walk(ids, n, [&](size_t i, uint64_t hash, uint32_t slot) {
      put(i, ids[i], obtain(ids[i], hash, slot, at), handles, values, writes);
    });
    return;
  }
  // Nothing is evicted: find and copy by several threads, then create what is absent, in order.
  share(n, kLeast, [&](size_t from, size_t to) {
    walk(ids + from, to - from, [&](size_t i, uint64_t, uint32_t slot) {
      i += from;
      if (slot != kNoSlot && expired(slot, at)) slot = kNoSlot;
      if (create && slot == kNoSlot) {
        handles[i] = kAbsent;
      } else {
        put(i, ids[i], slot, handles, values, writes);
      }
    });
  });
  if (!create) return;
  for (size_t i = 0; i < n; ++i) {
    if (handles[i] != kAbsent) continue;
    put(i, ids[i], obtain(ids[i], mix64(ids[i]), kNoSlot, at), handles, values, writes);
  }
}

size_t Table::refresh(const uint64_t* ids, size_t n, int64_t step, int64_t* handles, char* values,
                      int64_t* writes) {
  const std::scoped_lock hold(lock_);
  const uint32_t at = now(step);
  size_t replaced = 0;
  walk(ids, n, [&](size_t i, uint64_t hash, uint32_t slot) {
    slot = obtain(ids[i], hash, slot, at);
    const int64_t handle = slot == kNoSlot ? kAbsent : handle_of(slot);
    const int64_t count = slot == kNoSlot ? 0 : records_.writes(slot);
    if (handle == handles[i] && count == writes[i]) return;
    handles[i] = handle;
    writes[i] = count;
    if (slot == kNoSlot) {
      copy_initial(ids[i], values + i * value_bytes_);
    } else {
      copy_values(slot, values + i * value_bytes_);
    }
    ++replaced;
  });
  return replaced;
}

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

uint64_t Table::size() const {
  const std::scoped_lock hold(lock_);
  return live_;
}

uint64_t Table::resident_bytes() const {
  const std::scoped_lock hold(lock_);
  return uint64_t{used_} * (row_bytes_ + records_.bytes()) + index_.bytes() +
         gate_.counts().size();
}

Counters Table::counters() const {
  const std::scoped_lock hold(lock_);
  return counters_;
}

Rows Table::rows() const {
  const std::scoped_lock hold(lock_);
  Rows rows;
  const size_t state_bytes = options_.state_floats() * options_.compute_bytes();
  rows.values.resize(live_ * value_bytes_);
  rows.state.resize(live_ * state_bytes);
  for (uint32_t slot = 0; slot < used_; ++slot) {
    if (records_.id(slot) == kNoId || expired(slot, latest_step_)) continue;
    const size_t place = rows.ids.size();
    rows.ids.push_back(records_.id(slot));
    rows.writes.push_back(records_.writes(slot));
    copy_values(slot, rows.values.data() + place * value_bytes_);
    std::memcpy(rows.state.data() + place * state_bytes, row(slot) + options_.state_offset(),
                state_bytes);
  }
  rows.values.resize(rows.ids.size() * value_bytes_);
  rows.state.resize(rows.ids.size() * state_bytes);
  return rows;
}

}  // namespace embedding
