// Saving a table and putting it back.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "table.hpp"

namespace embedding {

// Calls visit(slot) for every row, the next one to be evicted first.
template <class Visit>
void Table::each_by_age(Visit visit) const {
  if (options_.eviction == Eviction::lru) {
    for (uint32_t slot = lru_.oldest(); slot != kNoSlot; slot = records_.newer(slot)) visit(slot);
    return;
  }
  const uint32_t first = clock_.hand() < used_ ? clock_.hand() : 0;
  for (uint32_t i = 0; i < used_; ++i) {
    const uint32_t slot = first + i < used_ ? first + i : first + i - used_;
    if (records_.id(slot) != kNoId) visit(slot);
  }
}

Snapshot Table::snapshot(bool only_changed, bool track) {
  const std::scoped_lock hold(lock_);
  if (only_changed && !options_.track_changes) {
    throw std::logic_error("a snapshot of changes needs an earlier snapshot that tracks them");
  }
  if (unsettled_.open) throw std::logic_error("the snapshot before this one must be settled first");
  Snapshot out;
  std::vector<uint32_t> slots;
  slots.reserve(live_);
  each_by_age([&](uint32_t slot) {
    const bool chosen = !only_changed || (records_.word(slot) & Records::kChanged);
    if (chosen && !expired(slot, latest_step_)) slots.push_back(slot);
  });
  out.rows.resize(slots.size() * row_bytes_);
  for (uint32_t slot : slots) {
    std::memcpy(&out.rows[out.ids.size() * row_bytes_], row(slot), row_bytes_);
    out.ids.push_back(records_.id(slot));
    out.words.push_back(records_.word(slot));
    if (records_.stamped()) out.stamps.push_back(records_.stamp(slot));
  }
  if (only_changed) out.removed = removed_;
  const bool marks = options_.track_changes || track;  // else there is nothing to give back
  unsettled_ = {marks, options_.track_changes, track, {}, std::move(removed_)};
  removed_.clear();
  options_.track_changes = marks;  // until it is known which of the two holds
  if (track) {
    for (uint32_t slot : slots) {
      const bool given_back = unsettled_.tracked && (records_.word(slot) & Records::kChanged);
      if (given_back) unsettled_.changed.push_back(records_.id(slot));
      records_.remove(slot, Records::kChanged);
    }
  }
  out.sightings = gate_.counts();
  out.latest_step = latest_step_;
  return out;
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
  for (size_t i = 0; i < from.ids.size(); ++i) {
    uint32_t slot = find(from.ids[i]);
    if (slot != kNoSlot && keep_present) continue;
    if (slot == kNoSlot) slot = create(from.ids[i], latest_step_);
    if (options_.eviction == Eviction::lru) lru_.touch(records_, slot);
    std::memcpy(row(slot), &from.rows[i * row_bytes_], row_bytes_);
    constexpr uint32_t own = (1u << Records::kGenerationShift) - 1;
    records_.set_word(slot, (records_.word(slot) & ~own) | (from.words[i] & own));
    if (records_.stamped()) {
      records_.set_stamp(slot, from.stamps.empty() ? latest_step_ : from.stamps[i]);
    }
  }
  counters_ = kept;
  if (from.sightings.size() == gate_.counts().size()) gate_.counts() = from.sightings;
  options_.track_changes = tracked;
}

}  // namespace embedding
