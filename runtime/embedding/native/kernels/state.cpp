// Saving a table and putting it back.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "table.hpp"

namespace embedding {

namespace {

constexpr std::chrono::microseconds kBetweenSlices{50};
constexpr size_t kSliceBytes = size_t{256} << 10;  // about 0.1 ms

}  // namespace

void Table::freeze(bool only_changed, bool track) {
  const std::scoped_lock hold(lock_);
  if (only_changed && !options_.track_changes) {
    throw std::logic_error("a snapshot of changes needs an earlier snapshot that tracks them");
  }
  if (unsettled_.open || frozen_) {
    throw std::logic_error("the snapshot before this one must be settled first");
  }
  const bool clock = options_.eviction == Eviction::clock;
  Instant at;
  at.slots = used_;
  at.rows = clock ? used_ : live_;
  at.first = options_.eviction == Eviction::lru ? lru_.oldest() : clock_.hand();
  at.latest_step = latest_step_;
  at.only_changed = only_changed && !clock;
  at.clear_marks = track;
  if (clock) at.free = free_;
  if (clock) sweep_.set_hand(clock_.hand());  // as in a table that is restored from this
  frozen_ = std::make_shared<Frozen>(options_, records_, slab_, gate_, at);
  records_.set_keeper(frozen_.get());
  gate_.set_keeper(frozen_.get());
  const bool marks = options_.track_changes || track;  // else there is nothing to give back
  unsettled_ = {marks, options_.track_changes, track, only_changed, {}, std::move(removed_)};
  removed_.clear();
  options_.track_changes = marks;  // until it is known which of the two holds
}

// What one holder of the lock copies.
size_t Table::slots_of_a_slice() const {
  return std::max<size_t>(kSliceBytes / (row_bytes_ + records_.bytes()), 16);
}

bool Table::copy_slice(size_t slots) {
  const std::scoped_lock hold(lock_);
  return copy_held(slots);
}

bool Table::copy_held(size_t slots) {
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
  std::vector<uint64_t> removed;
  {
    const std::scoped_lock hold(lock_);
    frozen = frozen_;
    if (!frozen) throw std::logic_error("there is no snapshot to collect");
    thaw();
    if (unsettled_.only_changed) removed = unsettled_.removed;
  }
  Image found = frozen->finish();
  found.removed = std::move(removed);
  return found;
}

// The end of a copy, whole or not; under the lock.
void Table::thaw() {
  if (!frozen_) return;
  records_.set_keeper(nullptr);
  gate_.set_keeper(nullptr);
  if (unsettled_.tracked && unsettled_.track) unsettled_.changed = frozen_->changed();
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
    if (slot == kNoSlot || expired(slot, latest_step_)) continue;
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

void Table::settle(bool kept) {
  const std::scoped_lock hold(lock_);
  if (kept && frozen_) throw std::logic_error("a snapshot must be collected before it is kept");
  thaw();
  if (!unsettled_.open) return;
  options_.track_changes = kept ? unsettled_.track : unsettled_.tracked;
  if (!kept) {
    for (uint64_t id : unsettled_.changed) {
      const uint32_t slot = find(id);  // if it went since, it is among the removed
      if (slot != kNoSlot) records_.add(slot, Records::kChanged);
    }
    removed_.insert(removed_.begin(), unsettled_.removed.begin(), unsettled_.removed.end());
  }
  if (!options_.track_changes) removed_.clear();
  unsettled_ = {};
}

void Table::restore(const Snapshot& from, bool keep_present) {
  const std::scoped_lock hold(lock_);
  const bool tracked = options_.track_changes;
  options_.track_changes = false;
  latest_step_ = std::max(latest_step_, from.latest_step);
  for (uint64_t id : from.removed) {
    const uint32_t slot = find(id);
    if (slot != kNoSlot) remove(slot);
  }
  const Counters kept = counters_;
  constexpr uint32_t own = Records::kMostWrites | Records::kUsed | Records::kChanged;
  const bool anew = used_ == 0;
  const auto empty = std::count(from.ids.begin(), from.ids.end(), kNoId);
  std::vector<uint32_t> holes(static_cast<size_t>(empty));
  for (size_t i = 0; i < from.ids.size(); ++i) {
    if (from.ids[i] == kNoId) {
      if (!anew) continue;
      const uint32_t slot = take_slot();
      records_.set_id(slot, kNoId);
      holes.at(from.words[i]) = slot;
      continue;
    }
    uint32_t slot = find(from.ids[i]);
    if (slot != kNoSlot && keep_present) continue;
    if (slot == kNoSlot) slot = create(from.ids[i], 0);  // at step 0 nothing is swept
    if (options_.eviction == Eviction::lru) lru_.touch(records_, slot);
    records_.set_word(slot, from.words[i] & own);
    std::memcpy(row(slot), &from.rows[i * row_bytes_], row_bytes_);
    if (records_.stamped()) {
      records_.set_stamp(slot, from.stamps.empty() ? latest_step_ : from.stamps[i]);
    }
  }
  if (anew) free_.insert(free_.end(), holes.begin(), holes.end());
  if (options_.eviction == Eviction::clock) sweep_.set_hand(clock_.hand());
  const uint64_t evicted = counters_.evicted;  // a smaller table has let rows go: they are lost
  counters_ = kept;
  counters_.evicted = evicted;
  if (from.sightings.size() == gate_.counts().size()) gate_.set_counts(from.sightings);
  options_.track_changes = tracked;
}

}  // namespace embedding
