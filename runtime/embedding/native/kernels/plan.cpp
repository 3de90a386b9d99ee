// Which distinct rows a batch needs of each table: one call for all fields and tables.
#include <algorithm>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "kernels.hpp"
#include "machine.hpp"

namespace embedding {

namespace {

constexpr size_t kAhead = 16;  // ids between prefetch and probe

// A hash table from id to its number, cleared by a new epoch instead of a sweep. An entry is 8 bytes
// (epoch, a piece of the hash, number), so that it stays in the cache; the ids stand in the result.
class Scratch {
 public:
  void start(size_t expected) {
    size_t size = 1024;
    while (size < 2 * expected) size *= 2;
    if (size > entries_.size() || size * 16 < entries_.size()) clear(size);
    if (++epoch_ > kMostEpoch) clear(entries_.size());
  }

  void prefetch(uint64_t hash) const { embedding::prefetch(&entries_[hash & mask_]); }
  bool crowded(size_t used) const { return 3 * used > 2 * entries_.size(); }

  // The number of `id` among the first `count` of `ids`, which it joins when it is new.
  uint32_t number(uint64_t id, uint64_t hash, uint64_t* ids, uint32_t& count) {
    const uint32_t mark = mark_of(hash);
    for (size_t at = hash & mask_;; at = (at + 1) & mask_) {
      Entry& entry = entries_[at];
      if (entry.mark >> kPieceBits != epoch_) {
        entry = {mark, count};
        ids[count] = id;
        return count++;
      }
      if (entry.mark == mark && ids[entry.number] == id) return entry.number;
    }
  }

  void grow(const uint64_t* ids, uint32_t count) {
    clear(2 * entries_.size());
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t hash = mix64(ids[i]);
      size_t at = hash & mask_;
      while (entries_[at].mark >> kPieceBits == epoch_) at = (at + 1) & mask_;
      entries_[at] = {mark_of(hash), i};
    }
  }

 private:
  struct Entry {
    uint32_t mark;  // epoch above, a piece of the hash below
    uint32_t number;
  };
  static constexpr uint32_t kPieceBits = 16;
  static constexpr uint32_t kMostEpoch = (1u << (32 - kPieceBits)) - 1;

  uint32_t mark_of(uint64_t hash) const {
    return epoch_ << kPieceBits | static_cast<uint32_t>(hash >> (64 - kPieceBits));
  }
  void clear(size_t size) {
    entries_.assign(size, Entry{0, 0});
    mask_ = size - 1;
    epoch_ = 1;
  }

  std::vector<Entry> entries_;
  size_t mask_ = 0;
  uint32_t epoch_ = 0;
};

// Which distinct ids `ids` [n] holds, grouped by shard, in the order of first appearance within a
// shard: they go to `distinct` (room for n), inverse [n] says which one each is, bounds [shards + 1]
// where those of a shard start. Returns how many. Scratch is kept per thread. A function of its own,
// so that its loop has the registers.
[[gnu::noinline]] size_t merge_duplicates(const uint64_t* ids, size_t n, uint32_t shards,
                                          int32_t* inverse, uint64_t* distinct, int64_t* bounds) {
  static thread_local Scratch kept;
  static thread_local std::vector<uint64_t> kept_ids;
  static thread_local std::vector<uint32_t> kept_shard;
  static thread_local std::vector<int32_t> kept_place;
  Scratch scratch = std::move(kept);  // here, so that the loop may hold it in registers
  scratch.start(n / 2);
  if (shards > 1 && kept_ids.size() < n) kept_ids.resize(n);  // once: fresh memory costs more
  uint64_t* const found = shards > 1 ? kept_ids.data() : distinct;
  uint32_t count = 0;
  uint64_t hashes[kAhead];
  for (size_t i = 0; i < std::min(kAhead, n); ++i) scratch.prefetch(hashes[i] = mix64(ids[i]));
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hash = hashes[i % kAhead];
    if (i + kAhead < n) scratch.prefetch(hashes[i % kAhead] = mix64(ids[i + kAhead]));
    inverse[i] = static_cast<int32_t>(scratch.number(ids[i], hash, found, count));
    if (scratch.crowded(count)) scratch.grow(found, count);
  }
  kept = std::move(scratch);
  std::fill(bounds, bounds + shards + 1, 0);
  if (shards == 1) {
    bounds[1] = count;
    return count;
  }
  // A stable counting sort by shard.
  std::vector<uint32_t>& shard = kept_shard;
  shard.resize(count);
  for (uint32_t u = 0; u < count; ++u) shard[u] = shard_of(mix64(found[u]), shards);
  for (uint32_t s : shard) ++bounds[s + 1];
  for (uint32_t s = 0; s < shards; ++s) bounds[s + 1] += bounds[s];
  std::vector<int64_t> next(bounds, bounds + shards);
  std::vector<int32_t>& place = kept_place;
  place.resize(count);
  for (uint32_t u = 0; u < count; ++u) {
    const int64_t to = next[shard[u]]++;
    distinct[to] = found[u];
    place[u] = static_cast<int32_t>(to);
  }
  for (size_t i = 0; i < n; ++i) inverse[i] = place[inverse[i]];
  return count;
}

struct TableShape {
  size_t dim;
  bool share_rows;          // fields see the same rows: the field's number is left out of the id
  uint32_t rounds;          // of a hash stack, whose rows make up an id; 0: the id has its own row
  uint64_t rows_per_round;
};

// Of all tables, side by side.
struct BatchPlan {
  Column<uint64_t> ids{0};          // distinct, of each table grouped by shard; `spans` has their end
  Column<int32_t> inverse{0};       // one entry for each round of each occurrence
  Column<int64_t> occurrences{0};   // where in the batch's ids; empty where there is one table
  std::vector<int64_t> spans;       // [tables, 3]: first id, ids, element where the first row starts
  std::vector<int64_t> bounds;      // [tables, shards + 1]: where a shard's ids start
  std::vector<int64_t> starts;      // [2, tables + 1]: of `inverse`, of `occurrences`
};

// The rows that each id is made of, in the order of rounds, as tests/oracles/reference/initial.py.
void stack(const uint64_t* ids, size_t n, const TableShape& shape, uint64_t value_mask,
           std::vector<uint64_t>& rows) {
  rows.resize(n * shape.rounds);
  for (size_t i = 0; i < n; ++i) {
    uint64_t hash = ids[i];
    for (uint32_t round = 0; round < shape.rounds; ++round) {
      hash = mix64(hash + 1);
      rows[i * shape.rounds + round] = (ids[i] & ~value_mask) |
                                       (hash % shape.rows_per_round + round * shape.rows_per_round);
    }
  }
}

// `bounds` [bags + 1] of the ids, empty: one id in every bag; `value_mask` is of the part of an id
// that is not its field's number.
BatchPlan plan_batch(const Ids& given, const Given<int64_t>& bounds, const Given<int32_t>& of_field,
                     const std::vector<TableShape>& tables, uint64_t value_mask, uint32_t shards) {
  const size_t n = given.shape(0), fields = of_field.shape(0);
  const int64_t* const offsets = bounds.shape(0) ? bounds.data() : nullptr;
  const size_t bags = offsets ? bounds.shape(0) - 1 : n;
  const int32_t* const table_of_field = of_field.data();
  static thread_local std::vector<uint64_t> kept_ids, kept_rows;
  const size_t count = tables.size();
  BatchPlan plan;
  plan.starts.assign(2 * (count + 1), 0);
  int64_t* const rows_start = plan.starts.data();
  int64_t* const start = rows_start + count + 1;
  const auto length = [&](size_t bag) {
    return offsets ? offsets[bag + 1] - offsets[bag] : 1;
  };
  if (count == 1) {
    start[1] = static_cast<int64_t>(n);
  } else {
    for (size_t bag = 0, f = 0; bag < bags; ++bag, f = f + 1 == fields ? 0 : f + 1) {
      start[table_of_field[f] + 1] += length(bag);
    }
  }
  for (size_t t = 0; t < count; ++t) {
    rows_start[t + 1] = rows_start[t] + start[t + 1] * std::max<int64_t>(1, tables[t].rounds);
    start[t + 1] += start[t];
  }
  // The ids as tables know them, table by table.
  const uint64_t* gathered = given.data();
  if (count > 1 || tables[0].share_rows) {
    kept_ids.resize(n);
    gathered = kept_ids.data();
    if (count > 1) plan.occurrences = Column<int64_t>(n);
    std::vector<int64_t> at(start, start + count);
    int64_t occurrence = 0;
    for (size_t bag = 0, f = 0; bag < bags; ++bag, f = f + 1 == fields ? 0 : f + 1) {
      const auto t = static_cast<size_t>(table_of_field[f]);
      const uint64_t mask = tables[t].share_rows ? value_mask : ~uint64_t{0};
      for (const int64_t end = occurrence + length(bag); occurrence < end; ++occurrence) {
        kept_ids[at[t]] = given.data()[occurrence] & mask;
        if (count > 1) plan.occurrences.data()[at[t]] = occurrence;
        ++at[t];
      }
    }
  }
  plan.ids = Column<uint64_t>(rows_start[count]);
  plan.inverse = Column<int32_t>(rows_start[count]);
  plan.bounds.resize(count * (shards + 1));
  int64_t first = 0, element = 0;
  for (size_t t = 0; t < count; ++t) {
    const uint64_t* ids = gathered + start[t];
    if (tables[t].rounds) {
      stack(ids, start[t + 1] - start[t], tables[t], value_mask, kept_rows);
      ids = kept_rows.data();
    }
    const auto distinct = static_cast<int64_t>(merge_duplicates(
        ids, rows_start[t + 1] - rows_start[t], shards, plan.inverse.data() + rows_start[t],
        plan.ids.data() + first, &plan.bounds[t * (shards + 1)]));
    plan.spans.insert(plan.spans.end(), {first, distinct, element});
    first += distinct;
    element += distinct * static_cast<int64_t>(tables[t].dim);
  }
  return plan;
}

// (floats of a row, whether fields share rows, rounds of a hash stack, its rows per round)
using PythonTable = std::tuple<size_t, bool, uint32_t, uint64_t>;

nb::tuple plan_tables(const Ids& ids, const Given<int64_t>& offsets,
                      const Given<int32_t>& table_of_field,
                      const std::vector<PythonTable>& tables, uint64_t value_mask, uint32_t shards) {
  const size_t fields = table_of_field.shape(0);
  const bool bags = offsets.shape(0) > 0;
  require(shards >= 1 && fields >= 1 && !tables.empty(), "there must be a shard, a field, a table");
  const size_t count = bags ? offsets.shape(0) - 1 : ids.shape(0);
  require(count % fields == 0 || tables.size() == 1, "a sample has one bag for each field");
  require(!bags || static_cast<size_t>(offsets.data()[count]) == ids.shape(0),
          "offsets must end where ids do");
  for (size_t f = 0; f < fields; ++f) {
    require(table_of_field.data()[f] >= 0 &&
                static_cast<size_t>(table_of_field.data()[f]) < tables.size(),
            "each field has one of the tables");
  }
  std::vector<TableShape> shapes;
  for (const auto& [dim, share_rows, rounds, rows] : tables) {
    require(!rounds || rows, "a hash stack has at least one row per round");
    shapes.push_back({dim, share_rows, rounds, rows});
  }
  BatchPlan plan = unlocked(
      [&] { return plan_batch(ids, offsets, table_of_field, shapes, value_mask, shards); });
  const size_t n = shapes.size();
  const auto rows = static_cast<size_t>(plan.spans[3 * n - 3] + plan.spans[3 * n - 2]);
  const size_t inverse = plan.inverse.size(), occurrences = plan.occurrences.size();
  return nb::make_tuple(give<uint64_t>(std::move(plan.ids), {rows}),
                        give<int64_t>(std::move(plan.spans), {n, 3}),
                        give<int64_t>(std::move(plan.bounds), {n, size_t{shards} + 1}),
                        give<int32_t>(std::move(plan.inverse), {inverse}),
                        give<int64_t>(std::move(plan.occurrences), {occurrences}),
                        give<int64_t>(std::move(plan.starts), {2, n + 1}));
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def("plan_tables", &plan_tables, "ids"_a, "offsets"_a, "table_of_field"_a, "tables"_a,
             "value_mask"_a, "shards"_a);
}

}  // namespace embedding
