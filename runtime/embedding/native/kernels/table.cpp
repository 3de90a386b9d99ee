// Lookups: rows found, created, evicted, copied; ids in flight hide the latency of memory.
#include "table.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace embedding {

namespace {

constexpr size_t kRing = 64;  // ids in flight: as many as all stages of prefetching span
constexpr int kVictimsAhead = 4;
// Rows of a lookup that the second level of cache still holds at the push.
constexpr size_t kNearBytes = size_t{512} << 10;
constexpr uint64_t kMostSlots = 0xFFFFFFF0u;

uint64_t most_rows_of(const Options& options) {
  return options.capacity_rows ? std::min(options.capacity_rows, kMostSlots) : kMostSlots;
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
      value_bytes_(options.state_offset()),
      most_rows_(most_rows_of(options)),
      index_(options.capacity_rows ? most_rows_ : 1024),
      records_(options_) {
  if ((options.eviction == Eviction::none) != (options.capacity_rows == 0)) {
    throw std::invalid_argument("capacity_rows and an eviction policy go together");
  }
  settle_prefetch();
}

// Calls visit(i, slot, view) for each id in order; who creates a row there takes the view anew. Stages
// run ahead of it, one id at a time (bursts of prefetches are dropped): the group; the row, or the group
// after a full one; the neighbours in the LRU list and the rows that were not in their first group.
template <class Visit>
void Table::walk(const uint64_t* ids, size_t n, Visit visit) const {
  uint32_t tags[kRing];
  uint32_t slots[kRing];
  View here = view();
  // The state comes with the values where the push will find it near; else the push fetches it.
  const bool near = row_bytes_ <= 128 && n * row_bytes_ <= kNearBytes;
  const size_t fetched_bytes = near ? row_bytes_ : options_.state_offset();
  const bool linked = options_.eviction == Eviction::lru;
  const auto hash_one = [&](size_t i) {
    if (i >= n) return;
    const uint32_t tag = tags[i % kRing] = Index::tag_of(mix64(ids[i]));
    here.groups.prefetch(here.groups.home(tag));
  };
  const auto fetch_row = [&](uint32_t slot) {
    here.records.prefetch(slot);
    prefetch_span(here.row(slot), fetched_bytes);
  };
  const auto guess_one = [&](size_t i) {
    if (i >= n) return;
    const uint32_t tag = tags[i % kRing];
    const uint64_t home = here.groups.home(tag);
    const uint32_t slot = slots[i % kRing] = here.groups.guess(tag, home);
    if (slot < Groups::kGoOn) {
      fetch_row(slot);
    } else if (slot == Groups::kGoOn) {
      here.groups.prefetch(here.groups.after(home));
    }
  };
  const auto settle_one = [&](size_t i) {
    if (i >= n) return;
    uint32_t slot = slots[i % kRing];
    if (slot == Groups::kGoOn) {
      const uint32_t tag = tags[i % kRing];
      uint64_t at = here.groups.home(tag);
      while ((slot = here.groups.guess(tag, at)) == Groups::kGoOn) at = here.groups.after(at);
      slots[i % kRing] = slot;
      if (slot != kNoSlot) fetch_row(slot);
    }
    if (!linked || slot == kNoSlot) return;
    const uint32_t newer = here.records.newer(slot), older = here.records.older(slot);
    if (newer != kNoSlot) here.records.prefetch(newer);
    if (older != kNoSlot) here.records.prefetch(older);
  };
  for (size_t i = 0; i < 3 * kAhead; ++i) hash_one(i);
  for (size_t i = 0; i < 2 * kAhead; ++i) guess_one(i);
  for (size_t i = 0; i < kAhead; ++i) settle_one(i);
  for (size_t i = 0; i < n; ++i) {
    hash_one(i + 3 * kAhead);
    guess_one(i + 2 * kAhead);
    settle_one(i + kAhead);
    uint32_t slot = slots[i % kRing];
    // Between guess and visit the row may have come or gone, and two ids may share a tag.
    if (slot == kNoSlot || here.records.id(slot) != ids[i]) slot = find(ids[i]);
    visit(i, slot, here);
  }
}

uint32_t Table::find(uint64_t id) const {
  return index_.find(Index::tag_of(mix64(id)),
                     [&](uint32_t slot) { return records_.id(slot) == id; });
}

uint32_t Table::now(int64_t step) {
  if (step > int64_t{latest_step_}) latest_step_ = static_cast<uint32_t>(step);
  return latest_step_;
}

void Table::use(uint32_t slot, uint32_t step) {
  if (options_.eviction == Eviction::lru) lru_.touch(records_, slot);
  if (records_.stamped()) records_.set_stamp(slot, step);
}

// The values that a row of this id begins with, as they are stored.
void Table::write_initial(uint64_t id, char* to) const {
  if (options_.wide) {
    fill_initial(options_, id, reinterpret_cast<double*>(to));
  } else {
    fill_initial(options_, id, reinterpret_cast<float*>(to));
  }
}

void Table::start_row(uint32_t slot, uint64_t id, uint32_t step) {
  records_.renew(slot, id);
  if (records_.stamped()) records_.set_stamp(slot, step);
  write_initial(id, row(slot));
  char* const state = row(slot) + options_.state_offset();
  const double first = options_.initial_accumulator;
  if (options_.wide) {
    std::fill_n(reinterpret_cast<double*>(state), options_.state_floats(), first);
  } else {
    std::fill_n(reinterpret_cast<float*>(state), options_.state_floats(), static_cast<float>(first));
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
}

void Table::evict_one() {
  prefetch_victims();
  const uint32_t slot = lru_.oldest();
  ++(records_.expired(slot, latest_step_) ? counters_.expired : counters_.evicted);
  remove(slot);
}

// Rows leave in an order that is known ahead: fetch what removing one of the next will touch.
void Table::prefetch_victims() const {
  uint32_t slot = lru_.oldest();
  for (int i = 0; i < kVictimsAhead && slot != kNoSlot; ++i) slot = records_.newer(slot);
  if (slot == kNoSlot) return;
  const uint32_t newer = records_.newer(slot);
  if (newer != kNoSlot) records_.prefetch(newer);
  index_.prefetch(Index::tag_of(mix64(records_.id(slot))));
  prefetch_span(row(slot), row_bytes_);
}

// A few slots for each row created: memory of expired rows comes back without a pause.
void Table::sweep_expired(uint32_t step) {
  for (int i = 0; i < 4 && used_ > 0; ++i, ++sweep_) {
    if (sweep_ >= used_) sweep_ = 0;
    if (records_.id(sweep_) != kNoId && records_.expired(sweep_, step)) {
      remove(sweep_);
      ++counters_.expired;
    }
  }
}

uint32_t Table::take_slot() {
  if (used_ >= most_rows_) {
    throw std::length_error("a shard holds at most 4294967280 rows of a table; use more shards");
  }
  records_.reserve(used_ + 1, most_rows_);
  slab_.grow((used_ + 1) * row_bytes_, most_rows_ * row_bytes_);
  return used_++;
}

uint32_t Table::create(uint64_t id, uint32_t step) {
  if (id == kNoId) {  // it would be trained, and stand in no checkpoint
    throw std::invalid_argument("id 2**64 - 1 can have no row; give other ids (is it a -1?)");
  }
  if (records_.stamped()) sweep_expired(step);
  if (options_.eviction != Eviction::none && live_ >= most_rows_) evict_one();
  index_.make_room();  // all that may fail comes before the first change
  uint32_t slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    slot = take_slot();
  }
  start_row(slot, id, step);
  index_.insert(Index::tag_of(mix64(id)), slot);
  if (options_.eviction == Eviction::lru) lru_.push(records_, slot);
  ++live_;
  return slot;
}

// The slot after a training lookup of `id`, which lies in `slot` if anywhere; kNoSlot if refused.
inline uint32_t Table::obtain(uint64_t id, uint32_t slot, uint32_t step, View& here) {
  if (slot != kNoSlot && !records_.expired(slot, step)) {
    use(slot, step);
    return slot;
  }
  slot = obtain_anew(id, slot, step);
  here = view();
  return slot;
}

// The same for an id without a row, or with an expired one.
uint32_t Table::obtain_anew(uint64_t id, uint32_t slot, uint32_t step) {
  if (slot != kNoSlot) {  // as if it had been swept: it must be admitted again
    remove(slot);
    ++counters_.expired;
  }
  if (!is_admitted(options_, id, step)) {
    ++counters_.not_admitted;
    return kNoSlot;
  }
  return create(id, step);
}

// What a read leaves for id i, whose row lies in `slot` if anywhere.
inline void Table::put(const Part& part, size_t i, uint32_t slot, const View& here) const {
  char* out = part.numbers + i * value_bytes_;
  if (slot == kNoSlot) {
    part.handles[i] = kAbsent;
    part.writes[i] = 0;
    write_initial(part.ids[i], out);
  } else {
    const uint64_t counters = here.records.counters(slot);
    part.handles[i] = handle_of(slot, counters);
    part.writes[i] = Records::writes_in(counters);
    copy_row(out, here.row(slot), value_bytes_);
  }
}

void Table::read(const Part& part, bool create, int64_t step) {
  const std::scoped_lock hold(lock_);
  help_to_copy(part.n);
  const uint32_t at = create ? now(step) : latest_step_;  // reading ahead is no use of the table
  const bool stamped = records_.stamped();
  if (create && (options_.eviction != Eviction::none || stamped)) {
    walk(part.ids, part.n, [=, this](size_t i, uint32_t slot, View& here) {
      slot = obtain(part.ids[i], slot, at, here);
      put(part, i, slot, here);
    });
    return;
  }
  // Nothing is evicted: find and copy by several threads, then create what is absent, in order.
  share(part.n, kLeast, [=, this](size_t from, size_t to) {
    walk(part.ids + from, to - from, [=, this](size_t i, uint32_t slot, const View& here) {
      i += from;
      if (stamped && slot != kNoSlot && records_.expired(slot, at)) slot = kNoSlot;
      if (create && slot == kNoSlot) {
        part.handles[i] = kAbsent;
      } else {
        put(part, i, slot, here);
      }
    });
  });
  if (!create) return;
  for (size_t i = 0; i < part.n; ++i) {
    if (part.handles[i] != kAbsent) continue;
    const uint32_t slot = obtain_anew(part.ids[i], kNoSlot, at);  // before the view: it moves rows
    put(part, i, slot, view());
  }
}

size_t Table::refresh(const Part& part, int64_t step) {
  const std::scoped_lock hold(lock_);
  help_to_copy(part.n);
  const uint32_t at = now(step);
  size_t replaced = 0;
  walk(part.ids, part.n, [&](size_t i, uint32_t slot, View& here) {
    slot = obtain(part.ids[i], slot, at, here);
    const uint64_t counters = slot == kNoSlot ? 0 : here.records.counters(slot);
    const int64_t handle = slot == kNoSlot ? kAbsent : handle_of(slot, counters);
    if (handle == part.handles[i] && Records::writes_in(counters) == part.writes[i]) return;
    put(part, i, slot, here);
    ++replaced;
  });
  return replaced;
}

// Rows that have expired and wait to be swept: whoever counts does not see when that happens.
uint64_t Table::expired_now() const {
  uint64_t count = 0;
  for (uint32_t slot = 0; records_.stamped() && slot < used_; ++slot) {
    count += records_.id(slot) != kNoId && records_.expired(slot, latest_step_);
  }
  return count;
}

uint64_t Table::size() const {
  const std::scoped_lock hold(lock_);
  return live_ - expired_now();
}

uint64_t Table::resident_bytes() const {
  const std::scoped_lock hold(lock_);
  return uint64_t{used_} * (row_bytes_ + records_.bytes()) + index_.bytes();
}

Counters Table::counters() const {
  const std::scoped_lock hold(lock_);
  Counters found = counters_;
  found.expired += expired_now();
  return found;
}

Rows Table::rows() const {
  const std::scoped_lock hold(lock_);
  Rows rows;
  const size_t state_bytes = options_.state_floats() * options_.number_bytes();
  rows.values.resize(live_ * value_bytes_);
  rows.state.resize(live_ * state_bytes);
  for (uint32_t slot = 0; slot < used_; ++slot) {
    if (records_.id(slot) == kNoId || records_.expired(slot, latest_step_)) continue;
    const size_t place = rows.ids.size();
    rows.ids.push_back(records_.id(slot));
    copy_row(rows.values.data() + place * value_bytes_, row(slot), value_bytes_);
    if (state_bytes == 0) continue;  // of sgd: there is no memory for none, and none to copy
    std::memcpy(rows.state.data() + place * state_bytes, row(slot) + options_.state_offset(),
                state_bytes);
  }
  rows.values.resize(rows.ids.size() * value_bytes_);
  rows.state.resize(rows.ids.size() * state_bytes);
  return rows;
}

}  // namespace embedding
