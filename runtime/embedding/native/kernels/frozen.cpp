#include "frozen.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "index.hpp"

namespace embedding {

namespace {

constexpr uint32_t kUnseen = 0, kUnwanted = 1, kFirstPlace = 2;  // of `places_`
constexpr uint32_t kFirstLink = 2;       // of `links_`: neighbours start here; kNoSlot wraps to 1
constexpr size_t kBlock = 4096;          // sightings copied at once
constexpr size_t kBlocks = 64;           // of them beside a slice of rows
constexpr uint32_t kLeastRoom = 1024;

void reserve(Pages& pages, uint64_t items, size_t bytes) {
  if (items * bytes) pages.reserve(items * bytes);
}

// column[k] becomes what column[order[k]] was.
template <class T>
void arrange(const std::vector<uint32_t>& order, T* column) {
  const std::vector<T> as_copied(column, column + order.size());
  for (size_t k = 0; k < order.size(); ++k) column[k] = as_copied[order[k]];
}

}  // namespace

Frozen::Frozen(const Options& options, Records& records, const Pages& slab, const Gate& gate,
               const Instant& at)
    : options_(options),
      records_(records),
      slab_(slab),
      gate_(gate),
      at_(at),
      row_bytes_(options.row_bytes()) {
  const size_t per_slot = at.slots * sizeof(uint32_t);
  places_.grow(per_slot, per_slot);
  if (options.eviction == Eviction::lru) links_.grow(per_slot, per_slot);
  reserve(image_.ids, at.rows, sizeof(uint64_t));
  reserve(image_.words, at.rows, sizeof(uint32_t));
  if (records.stamped()) reserve(image_.stamps, at.rows, sizeof(uint32_t));
  reserve(image_.rows, at.rows, row_bytes_);
  image_.latest_step = at.latest_step;
  image_.sightings_bytes = gate.counts().size();
  image_.sightings.grow(image_.sightings_bytes, image_.sightings_bytes);
  sightings_kept_.resize((image_.sightings_bytes + kBlock - 1) / kBlock);
}

bool Frozen::expired(uint32_t slot) const {
  return records_.stamped() && at_.latest_step > options_.expire_after_steps &&
         records_.stamp(slot) < at_.latest_step - options_.expire_after_steps;
}

bool Frozen::chosen(uint32_t slot) const {
  if (options_.eviction == Eviction::clock) return true;
  return records_.id(slot) != kNoId && !expired(slot) &&
         (!at_.only_changed || (records_.word(slot) & Records::kChanged));
}

void Frozen::keep(uint32_t slot) {
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
  if (at_.clear_marks) records_.remove(slot, Records::kChanged);  // asks again, and is answered above
}

void Frozen::keep_link(uint32_t slot) {
  if (slot < at_.slots && link(slot) == 0) link(slot) = records_.newer(slot) + kFirstLink;
}

void Frozen::keep_sightings(size_t counter) {
  const size_t block = counter / kBlock;
  if (sightings_kept_[block]) return;
  sightings_kept_[block] = true;
  const size_t from = block * kBlock, bytes = std::min(kBlock, image_.sightings_bytes - from);
  std::memcpy(image_.sightings.data() + from, gate_.counts().data() + from, bytes);
}

// The address space is there from the start, so that no copy moves while others are written.
bool Frozen::make_room(uint32_t to) {
  if (to < room_.load(std::memory_order_acquire)) return true;
  const std::scoped_lock hold(growing_);
  const uint32_t room = room_.load(std::memory_order_relaxed);
  if (to < room) return true;
  if (failure_) return false;
  const uint64_t wanted = std::max<uint64_t>({to + 1u, room + room / 2, kLeastRoom});
  const uint64_t now = std::min<uint64_t>(wanted, at_.rows);
  try {
    image_.ids.grow(now * sizeof(uint64_t), at_.rows * sizeof(uint64_t));
    image_.words.grow(now * sizeof(uint32_t), at_.rows * sizeof(uint32_t));
    if (records_.stamped()) {
      image_.stamps.grow(now * sizeof(uint32_t), at_.rows * sizeof(uint32_t));
    }
    image_.rows.grow(now * row_bytes_, at_.rows * row_bytes_);
  } catch (const OutOfMemory& error) {
    failure_ = error;
    return false;
  }
  room_.store(static_cast<uint32_t>(now), std::memory_order_release);
  return true;
}

bool Frozen::copy_slice(size_t slots) {
  const bool linked = options_.eviction == Eviction::lru;
  const auto until = static_cast<uint32_t>(std::min<uint64_t>(next_ + slots, at_.slots));
  for (; next_ < until && !failure_; ++next_) {
    if (linked) keep_link(next_);
    keep(next_);
  }
  const size_t last = std::min(next_block_ + kBlocks, sightings_kept_.size());
  for (; next_block_ < last; ++next_block_) keep_sightings(next_block_ * kBlock);
  return next_ == at_.slots && next_block_ == sightings_kept_.size();
}

size_t Frozen::copied() const { return std::min(taken_.load(), room_.load()); }

std::vector<uint64_t> Frozen::changed() const {
  std::vector<uint64_t> found;
  for (size_t i = 0; i < copied(); ++i) {
    if (words()[i] & Records::kChanged) found.push_back(ids()[i]);
  }
  return found;
}

// Places of the copies, the next row to be evicted first.
std::vector<uint32_t> Frozen::by_age() const {
  std::vector<uint32_t> order;
  order.reserve(copied());
  const auto add = [&](uint32_t slot) {
    if (place(slot) >= kFirstPlace) order.push_back(place(slot) - kFirstPlace);
  };
  if (options_.eviction == Eviction::lru) {
    for (uint32_t slot = at_.first; slot != kNoSlot; slot = link(slot) - kFirstLink) add(slot);
    return order;
  }
  for (uint32_t i = 0; i < at_.slots; ++i) {
    const uint64_t slot = uint64_t{at_.first} + i;
    add(static_cast<uint32_t>(slot < at_.slots ? slot : slot - at_.slots));
  }
  return order;
}

// The order is a permutation of the places: in place, one cycle after the other.
Image Frozen::finish() {
  for (uint32_t k = 0; k < at_.free.size(); ++k) words()[place(at_.free[k]) - kFirstPlace] = k;
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

}  // namespace embedding
