// The rows of one table that one shard owns.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.hpp"
#include "machine.hpp"
#include "records.hpp"

namespace embedding {

// What a lookup leaves in a batch's handle for each distinct id: the slot and its generation, so that
// a push finds the row without a search and never touches a row that took over the slot.
inline constexpr int64_t kAbsent = -1;

// Ids between one stage of prefetching and the next.
inline constexpr size_t kAhead = 16;
inline constexpr size_t kLeast = 4096;  // ids that are worth a second thread

struct Counters {
  uint64_t created = 0;
  uint64_t evicted = 0;
  uint64_t expired = 0;
  uint64_t not_admitted = 0;              // lookups that a row was refused to
  uint64_t gradients_not_admitted = 0;    // dropped: the id had no row
  uint64_t gradients_evicted = 0;         // dropped: the row went between lookup and push
};

// The rows of one (rank, step) in this table and shard, in a batch's arrays.
struct Part {
  const uint64_t* ids;  // distinct
  int64_t* handles;
  int64_t* writes;  // write counts at the moment of the lookup
  char* numbers;    // [n, dim]: values that a read fills, or gradients that a push takes
  size_t n;
};

struct Rows {
  std::vector<uint64_t> ids;
  std::vector<char> values;  // [n, dim], of the compute type
  std::vector<char> state;   // [n, state floats]
};

// Rows of a table on their way to another, or back: in the order in which they would be evicted.
struct Snapshot {
  std::vector<uint64_t> ids;
  std::vector<uint32_t> words;      // of the records: write counts
  std::vector<uint32_t> stamps;     // of expiry; empty without it
  std::vector<uint8_t> rows;        // [n, row bytes] as stored
  uint32_t latest_step = 0;
};

// The columns of a finished snapshot; n rows in that order.
struct Image {
  size_t n = 0;
  Pages ids;     // uint64
  Pages words;   // uint32
  Pages stamps;  // uint32, if rows have them
  Pages rows;    // [n, row bytes]
  uint32_t latest_step = 0;
};

class Frozen;

// Safe for threads: every operation takes the table's own lock.
class Table {
 public:
  explicit Table(const Options& options);

  // Rows of distinct ids, in their order. `create`: a training lookup, which creates absent rows
  // (if admitted), evicts, and counts as a use; otherwise an absent id gives its initial value.
  void read(const Part& part, bool create, int64_t step);
  // The training lookup of a batch that was read ahead: copies only rows written since (or new);
  // returns how many.
  size_t refresh(const Part& part, int64_t step);
  // One optimiser step on every row that the parts touch, gradients summed in the order of parts.
  // Adds to staleness [64] the number of writes that each gradient had missed.
  void push(const std::vector<Part>& parts, int64_t step, double lr, int64_t* staleness);

  // A snapshot of this instant. Copies nothing yet: `collect` does, and whoever changes a row before it
  // comes there (snapshots.cpp).
  void freeze();
  // Some of that copying, ahead of `collect`: the next slots; whether nothing is left to copy.
  bool copy_slice(size_t slots);
  // The rows as they were at `freeze`, in the order in which they would be evicted. Holds the table's
  // lock for some 0.1 ms at a time. Raises OutOfMemory; then the snapshot is over, and lost.
  Image collect();
  // Ends a snapshot that is not collected.
  void drop_snapshot();
  // Put rows (back) in, in the order given, the last one being the most recently used. With
  // `keep_present` rows that are here stay as they are.
  void restore(const Snapshot& from, bool keep_present = false);
  // Drops the rows of these ids, as if they had never been.
  void forget(const uint64_t* ids, size_t n);
  // The rows of these ids as they are, values and state; absent ids are left out. No side effect.
  Snapshot lease(const uint64_t* ids, size_t n) const;

  uint64_t size() const;
  uint64_t resident_bytes() const;
  Counters counters() const;
  Rows rows() const;
  const Options& options() const { return options_; }

 private:
  struct Collected;  // and the next one: of a push
  struct Missed;

  // What a search and a copy of values need, until a row is created. A loop keeps a copy in registers;
  // the table's own fields it would load again after every store.
  struct View {
    Groups groups;
    Records::Reader records;
    const char* rows;
    size_t row_bytes;
    const char* row(uint32_t slot) const { return rows + slot * row_bytes; }
  };
  View view() const { return {index_.groups(), records_.reader(), slab_.data(), row_bytes_}; }

  template <class Visit>
  void walk(const uint64_t* ids, size_t n, Visit visit) const;
  uint32_t find(uint64_t id) const;
  uint32_t obtain(uint64_t id, uint32_t slot, uint32_t step, View& here);
  uint32_t obtain_anew(uint64_t id, uint32_t slot, uint32_t step);
  uint32_t take_slot();  // one that no row has had yet
  uint32_t create(uint64_t id, uint32_t step);
  void start_row(uint32_t slot, uint64_t id, uint32_t step);
  void remove(uint32_t slot);
  void evict_one();
  void prefetch_victims() const;
  void sweep_expired(uint32_t step);
  void use(uint32_t slot, uint32_t step);
  uint32_t now(int64_t step);
  uint64_t expired_now() const;
  void write_initial(uint64_t id, char* to) const;
  static int64_t handle_of(uint32_t slot, uint64_t counters) {
    return static_cast<int64_t>(counters >> 32 << 32 | slot);
  }
  char* row(uint32_t slot) const { return slab_.data() + slot * row_bytes_; }
  void put(const Part& part, size_t i, uint32_t slot, const View& here) const;
  size_t collect(const Part& part, size_t from, size_t to, Collected& touched,
                 Missed& missed) const;
  static void prefetch_record(const Part& part, size_t i, const Records::Reader& records) {
    if (part.handles[i] != kAbsent) records.prefetch(static_cast<uint32_t>(part.handles[i]));
  }
  void push_one(const Part& part, int64_t step, double lr, Missed& missed);
  template <class T>
  void push_merged(const std::vector<Part>& parts, int64_t step, double lr, Missed& missed);
  void step_rows(const Collected& now, const Collected& ahead, bool in_order, int64_t step,
                 double lr);
  size_t slots_of_a_slice() const;
  // Where training leaves the lock no moment for `collect`, the copy goes on with training: whoever is
  // here for n ids copies as many slots, or one slice.
  void help_to_copy(size_t n);
  void thaw();
  double factor(int64_t step, double lr) const;

  const Options options_;
  size_t row_bytes_;
  size_t value_bytes_;   // of one row as given out, in the compute type
  uint64_t most_rows_;
  mutable std::mutex lock_;
  Index index_;
  Records records_;
  Pages slab_;
  LruList lru_;
  uint32_t sweep_ = 0;  // slot at which the search for expired rows goes on
  std::vector<uint32_t> free_;
  std::shared_ptr<Frozen> frozen_;  // between `freeze` and the end of `collect`
  uint32_t used_ = 0;   // slots ever taken
  uint64_t live_ = 0;
  uint32_t latest_step_ = 0;
  Counters counters_;
};

}  // namespace embedding
