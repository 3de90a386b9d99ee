// A table as it was at one instant, copied while the table goes on.
//
// At that instant only figures are noted. From then on whoever is about to change a row copies it
// first (the records ask, see keeper.hpp), and `copy_slice` copies the others in slices. Copies are
// appended in any order; `finish` brings them into the order in which rows would be evicted, which
// for an exact LRU list is read off the copied links.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "admission.hpp"
#include "keeper.hpp"
#include "memory_error.hpp"
#include "options.hpp"
#include "pages.hpp"
#include "records.hpp"

namespace embedding {

// What a snapshot is of.
struct Instant {
  uint32_t slots = 0;        // ever taken
  uint64_t rows = 0;         // at most so many are copied
  uint32_t first = 0;        // LRU: the oldest slot; else where the clock's hand stands
  uint32_t latest_step = 0;
  bool only_changed = false;
  bool clear_marks = false;  // changes are counted anew from here
  std::vector<uint32_t> free = {};  // clock: slots without a row, the next to be filled last
};

// The columns of a finished copy; n rows.
struct Image {
  size_t n = 0;
  Pages ids;     // uint64
  Pages words;   // uint32
  Pages stamps;  // uint32, if rows have them
  Pages rows;    // [n, row bytes]
  Pages sightings;
  size_t sightings_bytes = 0;
  uint32_t latest_step = 0;
  std::vector<uint64_t> removed;
};

// Every method but `finish` is called under the table's lock; `keep` by several threads at once, each
// for slots of its own.
class Frozen final : public Keeper {
 public:
  Frozen(const Options& options, Records& records, const Pages& slab, const Gate& gate,
         const Instant& at);

  void keep(uint32_t slot) override;
  void keep_link(uint32_t slot) override;
  void keep_sightings(size_t counter) override;

  // Looks at the next slots and copies what nobody has copied; whether there is nothing left.
  bool copy_slice(size_t slots);
  // Set once there was no memory for a copy: the snapshot is lost, and writers go on without it.
  const std::optional<OutOfMemory>& failure() const { return failure_; }
  // Ids of copied rows that were marked as changed.
  std::vector<uint64_t> changed() const;
  // When all is copied; takes no lock and needs none.
  Image finish();

 private:
  uint32_t& place(uint32_t slot) const {
    return reinterpret_cast<uint32_t*>(places_.data())[slot];
  }
  uint32_t& link(uint32_t slot) const { return reinterpret_cast<uint32_t*>(links_.data())[slot]; }
  uint64_t* ids() const { return reinterpret_cast<uint64_t*>(image_.ids.data()); }
  uint32_t* words() const { return reinterpret_cast<uint32_t*>(image_.words.data()); }
  uint32_t* stamps() const { return reinterpret_cast<uint32_t*>(image_.stamps.data()); }
  bool chosen(uint32_t slot) const;
  bool expired(uint32_t slot) const;
  bool make_room(uint32_t to);
  size_t copied() const;
  std::vector<uint32_t> by_age() const;

  const Options& options_;
  Records& records_;
  const Pages& slab_;
  const Gate& gate_;
  const Instant at_;
  const size_t row_bytes_;
  Pages places_;  // per slot: not looked at yet, not wanted, or where its copy lies
  Pages links_;   // per slot, LRU: its newer neighbour
  Image image_;
  std::vector<bool> sightings_kept_;  // per block
  std::atomic<uint32_t> taken_{0};    // places
  std::atomic<uint32_t> room_{0};     // places with memory
  std::mutex growing_;
  std::optional<OutOfMemory> failure_;
  uint32_t next_ = 0;       // slot that copy_slice goes on with
  size_t next_block_ = 0;   // of sightings
};

}  // namespace embedding
