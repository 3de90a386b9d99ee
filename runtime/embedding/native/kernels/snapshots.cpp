// Saving a table and putting it back: snapshots of one instant, leases, restoring.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "table.hpp"

namespace embedding {

namespace {

constexpr std::chrono::microseconds kBetweenSlices{50};
constexpr size_t kSliceBytes = size_t{256} << 10;  // about 0.1 ms
constexpr uint32_t kUnseen = 0, kUnwanted = 1, kFirstPlace = 2;  // of `places_`
constexpr uint32_t kFirstLink = 2;       // of `links_`: neighbours start here; kNoSlot wraps to 1
constexpr uint32_t kLeastRoom = 1024;

// What a snapshot is of.
struct Instant {
  uint32_t slots = 0;        // ever taken
  uint64_t rows = 0;         // at most so many are copied
  uint32_t first = 0;        // LRU: the oldest slot
  uint32_t latest_step = 0;
};

// column[k] becomes what column[order[k]] was.
template <class T>
void arrange(const std::vector<uint32_t>& order, T* column) {
  const std::vector<T> as_copied(column, column + order.size());
  for (size_t k = 0; k < order.size(); ++k) column[k] = as_copied[order[k]];
}

}  // namespace

// A table as it was at one instant, copied while the table goes on.
//
// At that instant only figures are noted. From then on whoever is about to change a row copies it
// first (the records ask), and `copy_slice` copies the others in slices. Copies are appended in any
// order; `finish` brings them into the order in which rows would be evicted, which for an exact LRU
// list is read off the copied links. Every method but `finish` is called under the table's lock;
// `keep` by several threads at once, each for slots of its own.
class Frozen final : public Keeper {
 public:
  Frozen(const Options& options, Records& records, const Pages& slab, Instant at)
      : options_(options),
        records_(records),
        slab_(slab),
        at_(std::move(at)),
        row_bytes_(options.row_bytes()) {
    const size_t per_slot = at_.slots * sizeof(uint32_t);
    places_.grow(per_slot, per_slot);
    if (options.eviction == Eviction::lru) links_.grow(per_slot, per_slot);
    // The address space is there from the start, so that no copy moves while others are written.
    for_columns([&](Pages& column, size_t bytes) {
      if (at_.rows * bytes) column.reserve(at_.rows * bytes);
    });
    image_.latest_step = at_.latest_step;
  }

  void keep(uint32_t slot) override {
    if (slot >= at_.slots || place(slot) != kUnseen) return;
    if (!chosen(slot)) {
      place(slot) = kUnwanted;
      return;
    }
    const uint32_t to = taken_.fetch_add(1, std::memory_order_relaxed);
    if (!make_room(to)) return;
    place(slot) = to + kFirstPlace;
    ids()[to] = records_.id(slot);
    words()[to] = records_.word(slot);
    if (records_.stamped()) stamps()[to] = records_.stamp(slot);
    std::memcpy(image_.rows.data() + to * row_bytes_, slab_.data() + slot * row_bytes_, row_bytes_);
  }

  void keep_link(uint32_t slot) override {
    if (slot < at_.slots && link(slot) == 0) link(slot) = records_.newer(slot) + kFirstLink;
  }

  // Looks at the next slots and copies what nobody has copied; whether there is nothing left.
  bool copy_slice(size_t slots) {
    const bool linked = options_.eviction == Eviction::lru;
    const auto until = static_cast<uint32_t>(std::min<uint64_t>(next_ + slots, at_.slots));
    for (; next_ < until && !failure_; ++next_) {
      if (linked) keep_link(next_);
      keep(next_);
    }
    return next_ == at_.slots;
  }

  // Set once there was no memory for a copy: the snapshot is lost, and writers go on without it.
  const std::optional<OutOfMemory>& failure() const { return failure_; }

  // When all is copied; takes no lock and needs none. The order is a permutation of the places: in
  // place, one cycle after the other.
  Image finish() {
    std::vector<uint32_t> order = by_age();
    image_.n = order.size();
    arrange(order, ids());
    arrange(order, words());
    if (records_.stamped()) arrange(order, stamps());
    char* rows = image_.rows.data();
    std::vector<char> first(row_bytes_);
    const auto move = [&](char* to, const char* from) { std::memcpy(to, from, row_bytes_); };
    for (uint32_t start = 0; start < order.size(); ++start) {
      if (order[start] == start) continue;
      move(first.data(), rows + start * row_bytes_);
      uint32_t to = start;
      while (order[to] != start) {
        const uint32_t from = std::exchange(order[to], to);
        move(rows + to * row_bytes_, rows + from * row_bytes_);
        to = from;
      }
      order[to] = to;
      move(rows + to * row_bytes_, first.data());
    }
    return std::move(image_);
  }

 private:
  uint32_t& place(uint32_t slot) const {
    return reinterpret_cast<uint32_t*>(places_.data())[slot];
  }
  uint32_t& link(uint32_t slot) const { return reinterpret_cast<uint32_t*>(links_.data())[slot]; }
  uint64_t* ids() const { return reinterpret_cast<uint64_t*>(image_.ids.data()); }
  uint32_t* words() const { return reinterpret_cast<uint32_t*>(image_.words.data()); }
  uint32_t* stamps() const { return reinterpret_cast<uint32_t*>(image_.stamps.data()); }
  size_t copied() const { return std::min(taken_.load(), room_.load()); }

  // Calls each(column, bytes of a row).
  template <class Each>
  void for_columns(Each each) {
    each(image_.ids, sizeof(uint64_t));
    each(image_.words, sizeof(uint32_t));
    if (records_.stamped()) each(image_.stamps, sizeof(uint32_t));
    each(image_.rows, row_bytes_);
  }

  bool chosen(uint32_t slot) const {
    return records_.id(slot) != kNoId && !records_.expired(slot, at_.latest_step);
  }

  bool make_room(uint32_t to) {
    if (to < room_.load(std::memory_order_acquire)) return true;
    const std::scoped_lock hold(growing_);
    const uint32_t room = room_.load(std::memory_order_relaxed);
    if (to < room) return true;
    if (failure_) return false;
    const uint64_t wanted = std::max<uint64_t>({to + 1u, room + room / 2, kLeastRoom});
    const uint64_t now = std::min<uint64_t>(wanted, at_.rows);
    try {
      for_columns([&](Pages& column, size_t bytes) { column.grow(now * bytes, at_.rows * bytes); });
    } catch (const OutOfMemory& error) {
      failure_ = error;
      return false;
    }
    room_.store(static_cast<uint32_t>(now), std::memory_order_release);
    return true;
  }

  // Places of the copies, the next row to be evicted first.
  std::vector<uint32_t> by_age() const {
    std::vector<uint32_t> order;
    order.reserve(copied());
    const auto add = [&](uint32_t slot) {
      if (place(slot) >= kFirstPlace) order.push_back(place(slot) - kFirstPlace);
    };
    if (options_.eviction == Eviction::lru) {
      for (uint32_t slot = at_.first; slot != kNoSlot; slot = link(slot) - kFirstLink) add(slot);
      return order;
    }
    for (uint32_t slot = 0; slot < at_.slots; ++slot) add(slot);
    return order;
  }

  const Options& options_;
  Records& records_;
  const Pages& slab_;
  const Instant at_;
  const size_t row_bytes_;
  Pages places_;  // per slot: not looked at yet, not wanted, or where its copy lies
  Pages links_;   // per slot, LRU: its newer neighbour
  Image image_;
  std::atomic<uint32_t> taken_{0};  // places
  std::atomic<uint32_t> room_{0};   // places with memory
  std::mutex growing_;
  std::optional<OutOfMemory> failure_;
  uint32_t next_ = 0;  // slot that copy_slice goes on with
};

void Table::freeze() {
  const std::scoped_lock hold(lock_);
  if (frozen_) {
    throw std::logic_error("the snapshot before this one must be collected or dropped first");
  }
  Instant at;
  at.slots = used_;
  at.rows = live_;
  at.first = options_.eviction == Eviction::lru ? lru_.oldest() : 0;
  at.latest_step = latest_step_;
  frozen_ = std::make_shared<Frozen>(options_, records_, slab_, at);
  records_.set_keeper(frozen_.get());
}

// What one holder of the lock copies.
size_t Table::slots_of_a_slice() const {
  return std::max<size_t>(kSliceBytes / (row_bytes_ + records_.bytes()), 16);
}

void Table::help_to_copy(size_t n) {
  if (frozen_) frozen_->copy_slice(std::min(n, slots_of_a_slice()));
}

bool Table::copy_slice(size_t slots) {
  const std::scoped_lock hold(lock_);
  if (!frozen_) throw std::logic_error("there is no snapshot to collect");
  const bool done = frozen_->copy_slice(slots);
  if (const auto& failure = frozen_->failure()) {
    const OutOfMemory error = *failure;
    thaw();
    throw error;
  }
  return done;
}

Image Table::collect() {
  while (!copy_slice(slots_of_a_slice())) {
    std::this_thread::sleep_for(kBetweenSlices);  // a lock taken again at once lets nobody else in
  }
  std::shared_ptr<Frozen> frozen;
  {
    const std::scoped_lock hold(lock_);
    frozen = frozen_;
    if (!frozen) throw std::logic_error("there is no snapshot to collect");
    thaw();
  }
  return frozen->finish();
}

void Table::drop_snapshot() {
  const std::scoped_lock hold(lock_);
  thaw();
}

// The end of a copy, whole or not; under the lock.
void Table::thaw() {
  if (!frozen_) return;
  records_.set_keeper(nullptr);
  frozen_.reset();
}

Snapshot Table::lease(const uint64_t* ids, size_t n) const {
  const std::scoped_lock hold(lock_);
  Snapshot out;
  out.latest_step = latest_step_;
  std::vector<uint32_t> slots;
  slots.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t slot = find(ids[i]);
    if (slot == kNoSlot || records_.expired(slot, latest_step_)) continue;
    slots.push_back(slot);
    out.ids.push_back(ids[i]);
    out.words.push_back(records_.word(slot));
    if (records_.stamped()) out.stamps.push_back(records_.stamp(slot));
  }
  out.rows.resize(slots.size() * row_bytes_);
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(&out.rows[i * row_bytes_], row(slots[i]), row_bytes_);
  }
  return out;
}

void Table::restore(const Snapshot& from, bool keep_present) {
  const std::scoped_lock hold(lock_);
  const uint64_t expired = counters_.expired + expired_now();  // those that come in were counted
  latest_step_ = std::max(latest_step_, from.latest_step);
  const uint64_t created = counters_.created;
  for (size_t i = 0; i < from.ids.size(); ++i) {
    uint32_t slot = find(from.ids[i]);
    if (slot != kNoSlot && keep_present) continue;
    if (slot == kNoSlot) slot = create(from.ids[i], 0);  // at step 0 nothing is swept
    if (options_.eviction == Eviction::lru) lru_.touch(records_, slot);
    records_.set_word(slot, from.words[i] & Records::kMostWrites);
    std::memcpy(row(slot), &from.rows[i * row_bytes_], row_bytes_);
    if (records_.stamped()) {
      records_.set_stamp(slot, from.stamps.empty() ? latest_step_ : from.stamps[i]);
    }
  }
  counters_.created = created;  // but a smaller table has let rows go, which are lost
  counters_.expired = expired - expired_now();
}

void Table::forget(const uint64_t* ids, size_t n) {
  const std::scoped_lock hold(lock_);
  const uint64_t expired = counters_.expired + expired_now();
  for (size_t i = 0; i < n; ++i) {
    const uint32_t slot = find(ids[i]);
    if (slot != kNoSlot) remove(slot);
  }
  counters_.expired = expired - expired_now();
}

}  // namespace embedding
