// Id -> slot: open addressing over groups of eight buckets, one group to a cache line.
//
// A bucket is the upper half of the id's hash (the tag) and the slot; the id itself stands in the
// row's record, which a lookup touches anyway. A search compares the eight tags of a group at once and
// goes on to the next group only when this one is full, so nearly every search touches one line. The
// home of a tag grows with the tag, so that a larger table is filled from a smaller one by one
// sequential pass, without looking at any id.
#pragma once

#include <cstdint>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.hpp"
#include "machine.hpp"

namespace embedding {

inline constexpr uint32_t kNoSlot = 0xFFFFFFFFu;

struct alignas(64) Group {  // filled from the front
  static constexpr uint32_t kSize = 8;
  uint32_t tags[kSize];
  uint32_t places[kSize];  // slot + 1; 0: empty

  bool full() const { return places[kSize - 1] != 0; }

  // Bit k is set where tag k agrees, be the bucket empty or not.
  uint32_t equal_tags(uint32_t tag) const {
#if defined(__SSE2__)
    const __m128i wanted = _mm_set1_epi32(static_cast<int>(tag));
    const auto* four = reinterpret_cast<const __m128i*>(tags);
    const __m128i low = _mm_cmpeq_epi32(_mm_load_si128(four), wanted);
    const __m128i high = _mm_cmpeq_epi32(_mm_load_si128(four + 1), wanted);
    const __m128i both = _mm_packs_epi32(low, high);
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(both, _mm_setzero_si128())));
#else
    uint32_t equal = 0;
    for (uint32_t k = 0; k < kSize; ++k) equal |= uint32_t{tags[k] == tag} << k;
    return equal;
#endif
  }
};

// The groups of an index, to be searched.
struct Groups {
  const Group* first;
  uint64_t count;

  uint64_t home(uint32_t tag) const { return uint64_t{tag} * count >> 32; }  // where a search begins
  uint64_t after(uint64_t at) const { return at + 1 == count ? 0 : at + 1; }
  void prefetch(uint64_t at) const { embedding::prefetch(first + at); }

  // The first slot of the group whose tag agrees: most likely the right one, so worth prefetching.
  // kNoSlot: there is none; kGoOn: not here, look at the group after it.
  static constexpr uint32_t kGoOn = kNoSlot - 1;
  uint32_t guess(uint32_t tag, uint64_t at) const {
    const Group& group = first[at];
    const uint32_t equal = group.equal_tags(tag);
    if (equal) return group.places[__builtin_ctz(equal)] - 1;  // an empty bucket is kNoSlot
    return group.full() ? kGoOn : kNoSlot;
  }
};

class Index {
 public:
  static constexpr double kMostLoad = 0.75;  // above it many groups are full and searches go on

  explicit Index(uint64_t rows_expected) { allocate(groups_for(rows_expected)); }

  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

  // Until the next `make_room`. A loop searches in a copy of its own, which stays in registers.
  Groups groups() const { return {groups_, count_}; }
  void prefetch(uint32_t tag) const { groups().prefetch(groups().home(tag)); }

  // The slot for which `is(slot)` holds among those of this tag; kNoSlot if there is none.
  template <class Is>
  uint32_t find(uint32_t tag, Is is) const {
    for (uint64_t at = home(tag);; at = after(at)) {
      const Group& group = groups_[at];
      for (uint32_t equal = group.equal_tags(tag); equal; equal &= equal - 1) {
        const uint32_t place = group.places[__builtin_ctz(equal)];
        if (place && is(place - 1)) return place - 1;
      }
      if (!group.full()) return kNoSlot;
    }
  }

  // Room for one entry more; raises OutOfMemory and is then as before.
  void make_room() {
    if (size_ + 1 > limit_) grow();
  }

  // After `make_room`.
  void insert(uint32_t tag, uint32_t slot) {
    place(tag, slot + 1);
    ++size_;
  }

  // Remove a present (tag, slot). A hole in a full group is filled from the groups behind it by an
  // entry that had passed it by, so that no search ends too early.
  void erase(uint32_t tag, uint32_t slot) {
    uint64_t hole = home(tag);
    uint32_t which;
    while ((which = position(groups_[hole], slot + 1)) == kSize) hole = after(hole);
    --size_;
    bool was_full = groups_[hole].full();
    take_out(groups_[hole], which);
    for (uint64_t at = after(hole); was_full; at = after(at)) {
      Group& group = groups_[at];
      const bool goes_on = group.full();
      for (uint32_t k = 0; k < kSize && group.places[k]; ++k) {
        if (distance(home(group.tags[k]), at) < distance(hole, at)) continue;
        put_in(groups_[hole], group.tags[k], group.places[k]);
        take_out(group, k);
        hole = at;
        break;
      }
      was_full = goes_on;
    }
  }

  uint64_t bytes() const { return count_ * sizeof(Group); }

 private:
  static constexpr uint32_t kSize = Group::kSize;

  uint64_t home(uint32_t tag) const { return groups().home(tag); }
  uint64_t after(uint64_t at) const { return groups().after(at); }
  static uint32_t position(const Group& group, uint32_t place) {
    uint32_t k = 0;
    while (k < kSize && group.places[k] != place) ++k;
    return k;
  }
  static void put_in(Group& group, uint32_t tag, uint32_t place) {
    const uint32_t k = position(group, 0);
    group.tags[k] = tag;
    group.places[k] = place;
  }
  static void take_out(Group& group, uint32_t which) {
    const uint32_t last = (group.full() ? kSize : position(group, 0)) - 1;
    group.tags[which] = group.tags[last];
    group.places[which] = group.places[last];
    group.tags[last] = group.places[last] = 0;
  }

  static uint64_t groups_for(uint64_t rows) {
    return static_cast<uint64_t>(static_cast<double>(rows) / kMostLoad / kSize) + 8;
  }
  uint64_t distance(uint64_t from, uint64_t to) const {
    return to >= from ? to - from : to + count_ - from;
  }

  // Empty groups; returns those before.
  Pages allocate(uint64_t count) {
    Pages fresh;
    fresh.grow(count * sizeof(Group), count * sizeof(Group));
    pages_ = std::move(fresh);
    count_ = count;
    limit_ = static_cast<uint64_t>(static_cast<double>(count * kSize) * kMostLoad);
    groups_ = reinterpret_cast<Group*>(pages_.data());
    return fresh;  // the old ones: a move is a swap
  }

  void place(uint32_t tag, uint32_t place) {
    uint64_t at = home(tag);
    while (groups_[at].full()) at = after(at);
    put_in(groups_[at], tag, place);
  }

  void grow() {
    const Group* from = groups_;
    const uint64_t old_count = count_;
    const Pages old = allocate(count_ + count_ / 2 + 8);
    for (uint64_t at = 0; at < old_count; ++at) {
      for (uint32_t k = 0; k < kSize && from[at].places[k]; ++k) {
        place(from[at].tags[k], from[at].places[k]);
      }
    }
  }

  Pages pages_;
  Group* groups_ = nullptr;
  uint64_t count_ = 0;
  uint64_t limit_ = 0;
  uint64_t size_ = 0;
};

}  // namespace embedding
