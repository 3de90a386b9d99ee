// Which row goes when the table is full: exact least recently used, or a clock.
#pragma once

#include "index.hpp"
#include "records.hpp"

namespace embedding {

// A doubly linked list through the records: newest first.
class LruList {
 public:
  void push(Records& records, uint32_t slot) {
    if (records.keeper()) [[unlikely]] keep_push(records, slot);
    link(records, slot);
  }

  void remove(Records& records, uint32_t slot) {
    if (records.keeper()) [[unlikely]] keep_remove(records, slot);
    unlink(records, slot);
  }

  void touch(Records& records, uint32_t slot) {
    if (slot == newest_) return;
    if (records.keeper()) [[unlikely]] {
      keep_remove(records, slot);
      keep_push(records, slot);
    }
    unlink(records, slot);
    link(records, slot);
  }

  uint32_t oldest() const { return oldest_; }

 private:
  // Before the newer neighbour of a slot changes.
  void keep_push(Records& records, uint32_t slot) const {
    records.keeper()->keep_link(slot);
    if (newest_ != kNoSlot) records.keeper()->keep_link(newest_);
  }
  static void keep_remove(Records& records, uint32_t slot) {
    if (records.older(slot) != kNoSlot) records.keeper()->keep_link(records.older(slot));
  }

  void link(Records& records, uint32_t slot) {
    records.set_older(slot, newest_);
    records.set_newer(slot, kNoSlot);
    if (newest_ == kNoSlot) {
      oldest_ = slot;
    } else {
      records.set_newer(newest_, slot);
    }
    newest_ = slot;
  }

  void unlink(Records& records, uint32_t slot) {
    const uint32_t newer = records.newer(slot), older = records.older(slot);
    if (newer == kNoSlot) {
      newest_ = older;
    } else {
      records.set_older(newer, older);
    }
    if (older == kNoSlot) {
      oldest_ = newer;
    } else {
      records.set_newer(older, newer);
    }
  }

  uint32_t newest_ = kNoSlot;
  uint32_t oldest_ = kNoSlot;
};

// A hand that passes over the slots, sparing each row that was used since its last visit.
class Clock {
 public:
  uint32_t victim(Records& records, uint32_t slots) {
    for (;;) {
      if (hand_ >= slots) hand_ = 0;
      const uint32_t slot = hand_++;
      if ((records.word(slot) & Records::kUsed) == 0) return slot;
      records.remove(slot, Records::kUsed);
    }
  }

  uint32_t hand() const { return hand_; }
  void set_hand(uint32_t hand) { hand_ = hand; }

 private:
  uint32_t hand_ = 0;
};

}  // namespace embedding
