// The record of a slot beside its row; which absent ids get a row, and which row goes when the table
// is full.
#pragma once

#include <cstdint>
#include <cstring>

#include "index.hpp"
#include "kernels.hpp"
#include "machine.hpp"

namespace embedding {

// Who is asked before anything of a table changes: a snapshot that is being copied, snapshots.cpp.
class Keeper {
 public:
  virtual void keep(uint32_t slot) = 0;       // before a record or its row changes
  virtual void keep_link(uint32_t slot) = 0;  // before a place in the LRU list changes

 protected:
  ~Keeper() = default;
};

inline constexpr uint64_t kNoId = ~uint64_t{0};  // no id is 2**64 - 1, see runtime.data.ids

// Word: optimiser steps taken (24 bits; after 2**24 - 1 it goes on from 2**23:
// counts near in time still differ). Generation: how many rows
// the slot has had, in 32 bits, so that no handle outlives a turn of it. 16 bytes a row, which never
// lie in two cache lines; 8 more for an exact LRU list, 4 more for expiry. A row changes only after its
// record, so that a keeper who is asked before each change of a record sees both as they were.
class Records {
 public:
  // Reads only, until the next `reserve`. A loop keeps a copy of its own, which stays in registers.
  struct Reader {
    const char* first;
    size_t bytes, links;

    const char* at(uint32_t slot) const { return first + slot * bytes; }
    uint64_t id(uint32_t slot) const { return load<uint64_t>(at(slot)); }
    uint32_t word(uint32_t slot) const { return load<uint32_t>(at(slot) + 8); }
    uint32_t generation(uint32_t slot) const { return load<uint32_t>(at(slot) + 12); }
    uint64_t counters(uint32_t slot) const { return load<uint64_t>(at(slot) + 8); }  // both at once
    uint32_t newer(uint32_t slot) const { return load<uint32_t>(at(slot) + links); }
    uint32_t older(uint32_t slot) const { return load<uint32_t>(at(slot) + links + 4); }
    void prefetch(uint32_t slot) const {
      const char* record = at(slot);
      embedding::prefetch(record);
      if (bytes != 16) embedding::prefetch(record + bytes - 1);  // it may lie in two lines
    }
  };
  Reader reader() const { return {pages_.data(), bytes_, links_}; }

  static constexpr uint32_t kMostWrites = (1u << 24) - 1;

  // The count after `from` of which `now` is a later one, in steps.
  static int64_t writes_between(int64_t from, int64_t now) {
    return now >= from ? now - from : now - from + (kMostWrites + 1) / 2;
  }

  explicit Records(const Options& options)
      : links_(options.eviction == Eviction::lru ? 16 : 0),
        stamp_(options.expire_after_steps ? (links_ ? 24 : 16) : 0),
        bytes_(16 + (links_ ? 8 : 0) + (stamp_ ? 4 : 0)),
        expire_after_steps_(options.expire_after_steps) {}

  // Who is asked before each change; null: nobody.
  void set_keeper(Keeper* keeper) { keeper_ = keeper; }
  Keeper* keeper() const { return keeper_; }

  void reserve(uint64_t rows, uint64_t most_rows) {
    pages_.grow(rows * bytes_, most_rows * bytes_);
  }
  size_t bytes() const { return bytes_; }
  void prefetch(uint32_t slot) const { reader().prefetch(slot); }

  uint64_t id(uint32_t slot) const { return reader().id(slot); }
  void set_id(uint32_t slot, uint64_t id) {
    keep(slot);
    store(at(slot), id);
  }

  uint32_t word(uint32_t slot) const { return reader().word(slot); }
  void set_word(uint32_t slot, uint32_t word) {
    keep(slot);
    store(at(slot) + 8, word);
  }
  static uint32_t writes_in(uint64_t counters) { return counters & kMostWrites; }

  // Counts one optimiser step on each of these distinct slots.
  void count_writes(const uint32_t* slots, size_t n) {
    for (size_t i = 0; keeper_ && i < n; ++i) keeper_->keep(slots[i]);
    char* const first = pages_.data();
    const size_t bytes = bytes_;
    for (size_t i = 0; i < n; ++i) {
      char* const word = first + slots[i] * bytes + 8;
      uint32_t now = load<uint32_t>(word);
      now = (now & kMostWrites) == kMostWrites ? now - kMostWrites / 2 : now + 1;
      store(word, now);
    }
  }
  // A fresh row in this slot: old handles of the slot become invalid.
  void renew(uint32_t slot, uint64_t id) {
    set_id(slot, id);
    set_word(slot, 0);
    store(at(slot) + 12, reader().generation(slot) + 1);
  }

  uint32_t newer(uint32_t slot) const { return reader().newer(slot); }
  uint32_t older(uint32_t slot) const { return reader().older(slot); }
  // For the list, which asks the keeper itself: once for all the links of a move.
  void set_newer(uint32_t slot, uint32_t to) { store(at(slot) + links_, to); }
  void set_older(uint32_t slot, uint32_t to) { store(at(slot) + links_ + 4, to); }

  bool stamped() const { return stamp_ != 0; }
  uint32_t stamp(uint32_t slot) const { return load<uint32_t>(at(slot) + stamp_); }
  bool expired(uint32_t slot, uint32_t step) const {
    return stamped() && step > expire_after_steps_ && stamp(slot) < step - expire_after_steps_;
  }
  void set_stamp(uint32_t slot, uint32_t step) {
    keep(slot);
    store(at(slot) + stamp_, step);
  }

 private:
  template <class T>
  static T load(const char* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  template <class T>
  static void store(char* to, T value) {
    std::memcpy(to, &value, sizeof value);
  }
  void keep(uint32_t slot) {
    if (keeper_) [[unlikely]] keeper_->keep(slot);
  }
  char* at(uint32_t slot) const { return pages_.data() + slot * bytes_; }

  size_t links_;
  size_t stamp_;
  size_t bytes_;
  uint32_t expire_after_steps_;
  Keeper* keeper_ = nullptr;
  Pages pages_;
};

// A doubly linked list through the records: newest first.
class LruList {
 public:
  void push(Records& records, uint32_t slot) {
    keep_link(records, slot);
    keep_link(records, newest_);
    records.set_older(slot, newest_);
    records.set_newer(slot, kNoSlot);
    if (newest_ == kNoSlot) {
      oldest_ = slot;
    } else {
      records.set_newer(newest_, slot);
    }
    newest_ = slot;
  }

  void remove(Records& records, uint32_t slot) {
    const uint32_t newer = records.newer(slot), older = records.older(slot);
    keep_link(records, older);
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

  void touch(Records& records, uint32_t slot) {
    if (slot == newest_) return;
    remove(records, slot);
    push(records, slot);
  }

  uint32_t oldest() const { return oldest_; }

 private:
  // Before the newer neighbour of a slot changes.
  static void keep_link(Records& records, uint32_t slot) {
    if (records.keeper() && slot != kNoSlot) [[unlikely]] records.keeper()->keep_link(slot);
  }

  uint32_t newest_ = kNoSlot;
  uint32_t oldest_ = kNoSlot;
};

// Whether an absent id gets a row, by a seeded draw for each training lookup that names it.
inline bool is_admitted(const Options& options, uint64_t id, uint32_t step) {
  constexpr uint64_t salt = 0x61646D6974ull;  // any constant: apart from the initial values
  const double most = options.admission_probability;
  return most >= 1 || unit(draw(options.key ^ salt, id, step)) < most;
}

}  // namespace embedding
