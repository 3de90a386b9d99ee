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
constexpr size_t kLeastIds = 8192;  // worth a second thread
// Ids of a field, for a team of one, from which on merging field by field pays. Of 26 fields two threads
// were 1.6 times as fast as one with 32,768 ids a field, 1.3 with 24,576, and 0.7 with 16,384 (measured
// 2026-11 on an EPYC of family 25); that more threads need fewer is assumed.
constexpr size_t kLeastIdsOfField = 2 * 24576;
constexpr size_t kLeastSamples = 512;

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

// Which distinct ids `ids` [n] holds, in the order of first appearance: they go to `distinct` (room
// for n), inverse [n] says which one each is. Returns how many. Scratch is kept per thread. A function
// of its own, so that its loop has the registers.
[[gnu::noinline]] uint32_t merge_duplicates(const uint64_t* ids, size_t n, int32_t* inverse,
                                            uint64_t* distinct) {
  static thread_local Scratch kept;
  Scratch scratch = std::move(kept);  // here, so that the loop may hold it in registers
  scratch.start(n / 2);
  uint32_t count = 0;
  uint64_t hashes[kAhead];
  for (size_t i = 0; i < std::min(kAhead, n); ++i) scratch.prefetch(hashes[i] = mix64(ids[i]));
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hash = hashes[i % kAhead];
    if (i + kAhead < n) scratch.prefetch(hashes[i % kAhead] = mix64(ids[i + kAhead]));
    inverse[i] = static_cast<int32_t>(scratch.number(ids[i], hash, distinct, count));
    if (scratch.crowded(count)) scratch.grow(distinct, count);
  }
  kept = std::move(scratch);
  return count;
}

// A stable counting sort by shard: `found` goes to `distinct`, bounds [shards + 1] says where those of
// a shard start.
void group_by_shard(const uint64_t* found, uint32_t count, uint32_t shards, size_t n,
                    int32_t* inverse, uint64_t* distinct, int64_t* bounds) {
  static thread_local std::vector<uint32_t> shard;
  static thread_local std::vector<int32_t> place;
  shard.resize(count);
  for (uint32_t u = 0; u < count; ++u) shard[u] = shard_of(mix64(found[u]), shards);
  std::fill(bounds, bounds + shards + 1, 0);
  for (uint32_t s : shard) ++bounds[s + 1];
  for (uint32_t s = 0; s < shards; ++s) bounds[s + 1] += bounds[s];
  std::vector<int64_t> next(bounds, bounds + shards);
  place.resize(count);
  for (uint32_t u = 0; u < count; ++u) {
    const int64_t to = next[shard[u]]++;
    distinct[to] = found[u];
    place[u] = static_cast<int32_t>(to);
  }
  for (size_t i = 0; i < n; ++i) inverse[i] = place[inverse[i]];
}

// Where the occurrences of a batch's fields stand.
struct Bags {
  const int64_t* offsets;  // [samples * fields + 1]; null: one id in every bag
  size_t samples, fields;

  // The first one of a field in a sample; of field `fields` the first one of the next sample.
  size_t at(size_t sample, size_t field) const {
    const size_t bag = sample * fields + field;
    return offsets ? static_cast<size_t>(offsets[bag]) : bag;
  }
};

// What merge_duplicates gives where fields have no id in common, by several threads. Each merges some of
// the fields: a hash table of one field stays in the second level of cache. Then what was found is
// numbered in the order of first appearance in the batch.
uint32_t merge_by_field(const uint64_t* ids, const Bags& bags, int32_t* inverse, uint64_t* distinct) {
  const size_t fields = bags.fields, samples = bags.samples;

  // Arrays hold all fields one after the other, with gaps: else a cache would keep the same part of
  // each of them in the same place.
  constexpr size_t kGap = 16;
  const size_t row = samples + kGap;
  Column<uint32_t> all_ends(fields * row), all_numbers(fields * row);
  uint32_t* const ends = all_ends.data();  // [fields, row]: where a field's ids of a sample end
  std::vector<size_t> begin(fields + 1, 0);
  for (size_t b = 0; b < samples; ++b) {
    for (size_t f = 0; f < fields; ++f) {
      begin[f + 1] += bags.at(b, f + 1) - bags.at(b, f);
      ends[f * row + b] = static_cast<uint32_t>(begin[f + 1]);
    }
  }
  for (size_t f = 0; f < fields; ++f) begin[f + 1] += begin[f] + kGap;
  Column<uint64_t> all_own(begin[fields]), all_found(begin[fields]);
  Column<int32_t> all_which(begin[fields]), all_given(begin[fields]);

  // Each field by itself: its ids side by side, merged, and how many are new in each bag.
  uint32_t* const first = all_numbers.data();  // [fields, row]: that; then the number of the first one
  share(fields, 1, [&](size_t from, size_t to) {
    std::vector<uint64_t*> at;
    for (size_t f = from; f < to; ++f) at.push_back(all_own.data() + begin[f]);
    for (size_t b = 0; b < samples; ++b) {
      const uint64_t* id = ids + bags.at(b, from);
      for (size_t f = from; f < to; ++f) {
        const uint64_t* const end = all_own.data() + begin[f] + ends[f * row + b];
        while (at[f - from] < end) *at[f - from]++ = *id++;
      }
    }
    for (size_t f = from; f < to; ++f) {
      const uint32_t* const end = ends + f * row;
      int32_t* const which = all_which.data() + begin[f];
      merge_duplicates(all_own.data() + begin[f], end[samples - 1], which,
                       all_found.data() + begin[f]);
      uint32_t i = 0;
      int32_t count = 0;
      for (size_t b = 0; b < samples; ++b) {
        const int32_t before = count;
        for (; i < end[b]; ++i) count += which[i] == count;  // without a branch: nobody foresees it
        first[f * row + b] = static_cast<uint32_t>(count - before);
      }
    }
  });
  uint32_t count = 0;
  for (size_t b = 0; b < samples; ++b) {
    for (size_t f = 0; f < fields; ++f) {
      const uint32_t fresh = std::exchange(first[f * row + b], count);
      count += fresh;
    }
  }

  // Each field's ids get their numbers; those of a bag end where those of the next one begin.
  share(fields, 1, [&](size_t from, size_t to) {
    for (size_t f = from; f < to; ++f) {
      const uint32_t* const next = f + 1 < fields ? first + (f + 1) * row : first + 1;
      const uint64_t* found = all_found.data() + begin[f];
      int32_t* const given = all_given.data() + begin[f];
      int32_t* last = given;
      for (size_t b = 0; b < samples; ++b) {
        const uint32_t end = f + 1 == fields && b + 1 == samples ? count : next[b];
        for (uint32_t number = first[f * row + b]; number < end; ++number) {
          *last++ = static_cast<int32_t>(number);
          distinct[number] = *found++;
        }
      }
      int32_t* const which = all_which.data() + begin[f];
      for (uint32_t i = 0; i < ends[f * row + samples - 1]; ++i) which[i] = given[which[i]];
    }
  });

  // And back in the order of the batch.
  share(samples, kLeastSamples, [&](size_t from, size_t to) {
    for (size_t b = from; b < to; ++b) {
      int32_t* out = inverse + bags.at(b, 0);
      for (size_t f = 0; f < fields; ++f) {
        const int32_t* const which = all_which.data() + begin[f];
        const uint32_t end = ends[f * row + b];
        for (uint32_t i = b ? ends[f * row + b - 1] : 0; i < end; ++i) *out++ = which[i];
      }
    }
  });
  return count;
}

// Of all tables, side by side.
struct BatchPlan {
  Column<uint64_t> ids{0};          // distinct, of each table grouped by shard; `spans` has their end
  Column<int32_t> inverse{0};       // one entry for each occurrence
  Column<int64_t> occurrences{0};   // where in the batch's ids; empty where there is one table
  std::vector<int64_t> spans;       // [tables, 3]: first id, ids, element where the first row starts
  std::vector<int64_t> bounds;      // [tables, shards + 1]: where a shard's ids start
  std::vector<int64_t> starts;      // [tables + 1]: of `inverse` and of `occurrences`
  std::vector<bool> apart;          // [tables]; empty where nobody has looked
};

// Of each table, whether none of its rows belongs to two fields: by what stands in the ids beside their
// value. Whoever makes a batch by hand may have given two fields the same ids.
std::vector<bool> rows_apart(const uint64_t* ids, const Bags& bags, const int32_t* table_of_field,
                             size_t tables, uint64_t value_mask) {
  const size_t fields = bags.fields;
  std::vector<uint64_t> tag(fields, 0), differ(fields, 0);
  std::vector<bool> met(fields, false);
  if (!bags.offsets && bags.samples) {  // in a loop that the compiler makes vectors of
    tag.assign(ids, ids + fields);
    met.assign(fields, true);
    for (size_t b = 0; b < bags.samples; ++b) {
      for (size_t f = 0; f < fields; ++f) differ[f] |= ids[b * fields + f] ^ tag[f];
    }
  }
  for (size_t b = 0; bags.offsets && b < bags.samples; ++b) {
    for (size_t f = 0; f < fields; ++f) {
      const size_t from = bags.at(b, f), to = bags.at(b, f + 1);
      if (from == to) continue;
      if (!met[f]) tag[f] = ids[from];
      met[f] = true;
      for (size_t i = from; i < to; ++i) differ[f] |= ids[i] ^ tag[f];
    }
  }
  std::vector<bool> apart(tables, true);
  std::vector<std::vector<uint64_t>> tags(tables);
  for (size_t f = 0; f < fields; ++f) {
    const auto t = static_cast<size_t>(table_of_field[f]);
    if (!met[f]) continue;
    tags[t].push_back(tag[f] & ~value_mask);
    if (differ[f] & ~value_mask) apart[t] = false;
  }
  for (size_t t = 0; t < tables; ++t) {
    std::sort(tags[t].begin(), tags[t].end());
    const bool twice = std::adjacent_find(tags[t].begin(), tags[t].end()) != tags[t].end();
    apart[t] = tags[t].size() < 2 || (apart[t] && !twice);
  }
  return apart;
}

// `bounds` [bags + 1] of the ids, empty: one id in every bag; `value_mask` is of the part of an id
// that is not its field's number.
BatchPlan plan_batch(const Ids& given, const Given<int64_t>& bounds, const Given<int32_t>& of_field,
                     const std::vector<size_t>& dims, uint64_t value_mask, uint32_t shards) {
  const size_t n = given.shape(0), fields = of_field.shape(0);
  const int64_t* const offsets = bounds.shape(0) ? bounds.data() : nullptr;
  const size_t bags = offsets ? bounds.shape(0) - 1 : n;
  const int32_t* const table_of_field = of_field.data();
  static thread_local std::vector<uint64_t> kept_ids;
  const size_t count = dims.size();
  BatchPlan plan;
  plan.starts.assign(count + 1, 0);
  int64_t* const start = plan.starts.data();
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
  for (size_t t = 0; t < count; ++t) start[t + 1] += start[t];
  // The ids as tables know them, table by table.
  const uint64_t* gathered = given.data();
  if (count > 1) {
    kept_ids.resize(n);
    gathered = kept_ids.data();
    plan.occurrences = Column<int64_t>(n);
    std::vector<int64_t> at(start, start + count);
    int64_t occurrence = 0;
    for (size_t bag = 0, f = 0; bag < bags; ++bag, f = f + 1 == fields ? 0 : f + 1) {
      const auto t = static_cast<size_t>(table_of_field[f]);
      for (const int64_t end = occurrence + length(bag); occurrence < end; ++occurrence) {
        kept_ids[at[t]] = given.data()[occurrence];
        plan.occurrences.data()[at[t]] = occurrence;
        ++at[t];
      }
    }
  }
  plan.ids = Column<uint64_t>(n);
  plan.inverse = Column<int32_t>(n);
  plan.bounds.assign(count * (shards + 1), 0);
  const size_t samples = bags / fields;
  const bool whole_samples = samples * fields == bags;
  if (threads() > 1 && whole_samples) {
    plan.apart = rows_apart(given.data(), {offsets, samples, fields}, table_of_field, count, value_mask);
  }

  // Tables side by side, each with room for as many distinct ids as it has; a large one by its fields.
  std::vector<int64_t> distinct(count);
  share(count, std::max<size_t>(1, count * kLeastIds / (n + 1)), [&](size_t from, size_t to) {
    static thread_local std::vector<uint64_t> kept_found;
    for (size_t t = from; t < to; ++t) {
      const uint64_t* ids = gathered + start[t];
      const auto met = static_cast<size_t>(start[t + 1] - start[t]);
      int32_t* const inverse = plan.inverse.data() + start[t];
      uint64_t* const into = plan.ids.data() + start[t];
      int64_t* const bounds_of = &plan.bounds[t * (shards + 1)];
      if (shards > 1 && kept_found.size() < met) kept_found.resize(met);  // fresh memory costs more
      uint64_t* const found = shards > 1 ? kept_found.data() : into;
      const bool by_field = count == 1 && fields >= threads() &&
                            met >= kLeastIdsOfField / threads() * fields && !plan.apart.empty() &&
                            plan.apart[0];
      const uint32_t merged =
          by_field ? merge_by_field(ids, {offsets, samples, fields}, inverse, found)
                   : merge_duplicates(ids, met, inverse, found);
      bounds_of[shards] = distinct[t] = merged;
      if (shards > 1) group_by_shard(found, merged, shards, met, inverse, into, bounds_of);
    }
  });
  int64_t first = 0, element = 0;
  for (size_t t = 0; t < count; ++t) {
    std::copy_n(plan.ids.data() + start[t], distinct[t], plan.ids.data() + first);
    plan.spans.insert(plan.spans.end(), {first, distinct[t], element});
    first += distinct[t];
    element += distinct[t] * static_cast<int64_t>(dims[t]);
  }
  return plan;
}

nb::tuple plan_tables(const Ids& ids, const Given<int64_t>& offsets,
                      const Given<int32_t>& table_of_field,
                      const std::vector<size_t>& dims, uint64_t value_mask, uint32_t shards) {
  const size_t fields = table_of_field.shape(0);
  const bool bags = offsets.shape(0) > 0;
  require(shards >= 1 && fields >= 1 && !dims.empty(), "there must be a shard, a field, a table");
  const size_t count = bags ? offsets.shape(0) - 1 : ids.shape(0);
  require(count % fields == 0 || dims.size() == 1, "a sample has one bag for each field");
  require(!bags || static_cast<size_t>(offsets.data()[count]) == ids.shape(0),
          "offsets must end where ids do");
  for (size_t f = 0; f < fields; ++f) {
    require(table_of_field.data()[f] >= 0 &&
                static_cast<size_t>(table_of_field.data()[f]) < dims.size(),
            "each field has one of the tables");
  }
  BatchPlan plan = unlocked(
      [&] { return plan_batch(ids, offsets, table_of_field, dims, value_mask, shards); });
  const size_t n = dims.size();
  const auto rows = static_cast<size_t>(plan.spans[3 * n - 3] + plan.spans[3 * n - 2]);
  const size_t inverse = plan.inverse.size(), occurrences = plan.occurrences.size();
  nb::list apart;
  for (const bool one : plan.apart) apart.append(one);
  return nb::make_tuple(give<uint64_t>(std::move(plan.ids), {rows}),
                        give<int64_t>(std::move(plan.spans), {n, 3}),
                        give<int64_t>(std::move(plan.bounds), {n, size_t{shards} + 1}),
                        give<int32_t>(std::move(plan.inverse), {inverse}),
                        give<int64_t>(std::move(plan.occurrences), {occurrences}),
                        give<int64_t>(std::move(plan.starts), {n + 1}), apart);
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def("plan_tables", &plan_tables, "ids"_a, "offsets"_a, "table_of_field"_a, "dims"_a,
             "value_mask"_a, "shards"_a);
}

}  // namespace embedding
