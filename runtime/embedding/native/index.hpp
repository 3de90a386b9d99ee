// Id -> slot: open addressing with linear probing over 8-byte buckets.
//
// A bucket holds the upper half of the id's hash (the tag) and the slot; the id itself stands in the
// row's record, which a lookup touches anyway. The home of a tag grows with the tag, so that a larger
// table is filled from a smaller one by one sequential pass, without looking at any id.
#pragma once

#include <cstdint>
#include <utility>

#include "hash.hpp"
#include "pages.hpp"
#include "prefetch.hpp"

namespace embedding {

inline constexpr uint32_t kNoSlot = 0xFFFFFFFFu;

class Index {
 public:
  static constexpr double kMostLoad = 0.75;  // above it the length of a failing search explodes

  explicit Index(uint64_t rows_expected) { allocate(buckets_for(rows_expected)); }

  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

  void prefetch(uint32_t tag) const { embedding::prefetch(&buckets_[home(tag)]); }

  // The first slot whose tag agrees: most likely the right one, so worth prefetching.
  uint32_t guess(uint32_t tag) const {
    for (uint64_t at = home(tag);; at = after(at)) {
      const uint64_t bucket = buckets_[at];
      if (bucket == 0) return kNoSlot;
      if (bucket >> 32 == tag) return slot(bucket);
    }
  }

  // The slot for which `is(slot)` holds among those of this tag; kNoSlot if there is none.
  template <class Is>
  uint32_t find(uint32_t tag, Is is) const {
    for (uint64_t at = home(tag);; at = after(at)) {
      const uint64_t bucket = buckets_[at];
      if (bucket == 0) return kNoSlot;
      if (bucket >> 32 == tag && is(slot(bucket))) return slot(bucket);
    }
  }

  void insert(uint32_t tag, uint32_t slot) {
    if (size_ + 1 > limit_) grow();
    place(uint64_t{tag} << 32 | (slot + 1));
    ++size_;
  }

  // Remove a present (tag, slot), moving later entries of the run back so that no gap breaks it.
  void erase(uint32_t tag, uint32_t slot) {
    const uint64_t bucket = uint64_t{tag} << 32 | (slot + 1);
    uint64_t hole = home(tag);
    while (buckets_[hole] != bucket) hole = after(hole);
    for (uint64_t at = after(hole); buckets_[at] != 0; at = after(at)) {
      const uint64_t from = home(static_cast<uint32_t>(buckets_[at] >> 32));
      if (distance(from, at) >= distance(hole, at)) {
        buckets_[hole] = buckets_[at];
        hole = at;
      }
    }
    buckets_[hole] = 0;
    --size_;
  }

  uint64_t size() const { return size_; }
  uint64_t bytes() const { return count_ * sizeof(uint64_t); }

 private:
  static uint32_t slot(uint64_t bucket) { return static_cast<uint32_t>(bucket) - 1; }
  static uint64_t buckets_for(uint64_t rows) {
    return static_cast<uint64_t>(static_cast<double>(rows) / kMostLoad) + 64;
  }
  uint64_t home(uint32_t tag) const { return uint64_t{tag} * count_ >> 32; }
  uint64_t after(uint64_t at) const { return at + 1 == count_ ? 0 : at + 1; }
  uint64_t distance(uint64_t from, uint64_t to) const {
    return to >= from ? to - from : to + count_ - from;
  }

  void allocate(uint64_t count) {
    count_ = count;
    limit_ = static_cast<uint64_t>(static_cast<double>(count) * kMostLoad);
    pages_ = Pages(count * sizeof(uint64_t));
    pages_.grow(count * sizeof(uint64_t));
    buckets_ = reinterpret_cast<uint64_t*>(pages_.data());
  }

  void place(uint64_t bucket) {
    uint64_t at = home(static_cast<uint32_t>(bucket >> 32));
    while (buckets_[at] != 0) at = after(at);
    buckets_[at] = bucket;
  }

  void grow() {
    Pages old = std::move(pages_);
    const uint64_t* from = buckets_;
    const uint64_t old_count = count_;
    allocate(count_ + count_ / 2 + 64);
    for (uint64_t at = 0; at < old_count; ++at) {
      if (from[at] != 0) place(from[at]);
    }
  }

  Pages pages_;
  uint64_t* buckets_ = nullptr;
  uint64_t count_ = 0;
  uint64_t limit_ = 0;
  uint64_t size_ = 0;
};

}  // namespace embedding
