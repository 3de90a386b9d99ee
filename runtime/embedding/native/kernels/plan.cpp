// Which distinct rows a batch needs of each table: one call for all fields and tables.
#include <algorithm>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "kernels.hpp"
#include "machine.hpp"

namespace embedding {

namespace {

// Ids between prefetch and probe, and between the prefetch of an id that may be the same and its use.
// Of 852 k ids (2 MiB of second-level cache; measured 2026-11) these took 8.3 ms, 16 and none 10.1.
constexpr size_t kAhead = 32, kKnownAhead = 8;
constexpr size_t kMostNear = 65536;  // ids that stay in a cache while they are merged
constexpr size_t kLeastIds = 8192;  // worth a second thread
// Of a thread, from which on sharing a table's ids is worth it. With 426 k for each of two, they took
// 0.84 of one thread's time with warm caches, and as long as it with cold ones (measured 2026-11).
constexpr size_t kLeastIdsOfPart = 65536;

// A hash table from id to its number, cleared by a new epoch instead of a sweep. An entry is 8 bytes
// (epoch, a piece of the hash, number), so that it stays in the cache; the ids stand in the result.
class Scratch {
 public:
  struct Entry {
    uint32_t mark;  // epoch above, a piece of the hash below
    uint32_t number;
  };
  static constexpr uint32_t kPieceBits = 16;

  void start(size_t expected) {
    size_t size = 1024;
    while (size < 2 * expected) size *= 2;
    if (size > mask_ + 1 || size * 16 < mask_ + 1) clear(size);
    if (++epoch_ > kMostEpoch) clear(mask_ + 1);
  }

  Entry* entries() { return entries_.data(); }
  size_t mask() const { return mask_; }
  uint32_t epoch() const { return epoch_; }
  uint32_t most() const { return static_cast<uint32_t>((mask_ + 1) / 3 * 2); }

  void grow(const uint64_t* ids, uint32_t count) {
    clear(2 * (mask_ + 1));
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t hash = mix64(ids[i]);
      size_t at = hash & mask_;
      while (entries()[at].mark >> kPieceBits == epoch_) at = (at + 1) & mask_;
      entries()[at] = {mark_of(hash, epoch_), i};
    }
  }

  static uint32_t mark_of(uint64_t hash, uint32_t epoch) {
    return epoch << kPieceBits | static_cast<uint32_t>(hash >> (64 - kPieceBits));
  }

 private:
  static constexpr uint32_t kMostEpoch = (1u << (32 - kPieceBits)) - 1;

  void clear(size_t size) {
    entries_ = Column<Entry>(size);
    std::fill_n(entries(), size, Entry{0, 0});
    mask_ = size - 1;
    epoch_ = 1;
  }

  Column<Entry> entries_{0};  // [mask_ + 1], on huge pages where it is large
  size_t mask_ = 0;
  uint32_t epoch_ = 0;
};

// Numbers ids from number `at` on, until all n have one or the table is crowded; returns where it
// stopped. A function of its own, so that its loop has the registers. `Far`: what it looks up comes
// from no near cache, entries or ids.
template <bool Far>
[[gnu::noinline]] size_t number_ids(Scratch& scratch, const uint64_t* ids, size_t at, size_t n,
                                    int32_t* inverse, uint64_t* distinct, uint32_t& numbered) {
  Scratch::Entry* const entries = scratch.entries();
  const size_t mask = scratch.mask();
  const uint32_t epoch = scratch.epoch(), most = scratch.most();
  constexpr size_t ahead = Far ? kAhead : kAhead / 2;
  uint64_t hashes[ahead] = {};
  uint32_t count = numbered;
  for (size_t i = at; i < std::min(at + ahead, n); ++i) {
    prefetch(entries + ((hashes[i % ahead] = mix64(ids[i])) & mask));
  }
  for (; at < n && count < most; ++at) {
    const uint64_t id = ids[at], hash = hashes[at % ahead];
    if (at + ahead < n) prefetch(entries + ((hashes[at % ahead] = mix64(ids[at + ahead])) & mask));
    if (Far) prefetch(distinct + entries[hashes[(at + kKnownAhead) % ahead] & mask].number);
    const uint32_t mark = Scratch::mark_of(hash, epoch);
    for (size_t place = hash & mask;; place = (place + 1) & mask) {
      Scratch::Entry& entry = entries[place];
      if (entry.mark >> Scratch::kPieceBits != epoch) {
        entry = {mark, count};
        distinct[count] = id;
        inverse[at] = static_cast<int32_t>(count++);
        break;
      }
      if (entry.mark == mark && distinct[entry.number] == id) {
        inverse[at] = static_cast<int32_t>(entry.number);
        break;
      }
    }
  }
  numbered = count;
  return at;
}

// Which distinct ids `ids` [n] holds, in the order of first appearance: they go to `distinct` (room
// for n), inverse [n] says which one each is. Returns how many. Scratch is kept per thread.
uint32_t merge_duplicates(const uint64_t* ids, size_t n, int32_t* inverse, uint64_t* distinct) {
  static thread_local Scratch scratch;
  scratch.start(n / 2);
  const auto number = n > kMostNear ? number_ids<true> : number_ids<false>;
  uint32_t count = 0;
  for (size_t at = 0; at < n;) {
    if (count >= scratch.most()) scratch.grow(distinct, count);
    at = number(scratch, ids, at, n, inverse, distinct, count);
  }
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

// A run of fields: its ids side by side, merged, and how many of each sample are new.
struct Part {
  Column<uint64_t> own{0}, found{0};
  Column<int32_t> which{0};
  Column<uint32_t> fresh{0};
};

// What merge_duplicates gives where fields have no id in common, by several threads. Each merges some of
// the fields; then what was found is numbered in the order of first appearance in the batch.
uint32_t merge_by_part(const uint64_t* ids, const Bags& bags, size_t parts, int32_t* inverse,
                       uint64_t* distinct) {
  const size_t samples = bags.samples;
  const auto field = [&](size_t part) { return bags.fields * part / parts; };
  std::vector<Part> all(parts);
  share(parts, 1, [&](size_t from, size_t to) {
    for (size_t p = from; p < to; ++p) {
      const size_t first = field(p), last = field(p + 1);
      size_t n = 0;
      for (size_t b = 0; b < samples; ++b) n += bags.at(b, last) - bags.at(b, first);
      Part& part = all[p];
      part = {Column<uint64_t>(n), Column<uint64_t>(n), Column<int32_t>(n), Column<uint32_t>(samples)};
      uint64_t* own = part.own.data();
      for (size_t b = 0; b < samples; ++b) {
        own = std::copy(ids + bags.at(b, first), ids + bags.at(b, last), own);
      }
      merge_duplicates(part.own.data(), n, part.which.data(), part.found.data());
      const int32_t* which = part.which.data();
      int32_t count = 0;
      for (size_t b = 0; b < samples; ++b) {
        const int32_t before = count;
        const int32_t* const end = which + (bags.at(b, last) - bags.at(b, first));
        while (which < end) count += *which++ == count;  // without a branch: nobody foresees it
        part.fresh.data()[b] = static_cast<uint32_t>(count - before);
      }
    }
  });
  Column<uint32_t> all_starts(samples * parts + 1);  // the number of a sample's first new id of a part
  uint32_t* const starts = all_starts.data();
  starts[0] = 0;
  for (size_t b = 0, at = 0; b < samples; ++b) {
    for (size_t p = 0; p < parts; ++p, ++at) starts[at + 1] = starts[at] + all[p].fresh.data()[b];
  }
  share(parts, 1, [&](size_t from, size_t to) {
    for (size_t p = from; p < to; ++p) {
      const size_t first = field(p), last = field(p + 1);
      Column<int32_t> all_given(all[p].which.size());
      const int32_t *const given = all_given.data(), *which = all[p].which.data();
      const uint64_t* found = all[p].found.data();
      int32_t* next = all_given.data();
      for (size_t b = 0; b < samples; ++b) {
        const uint32_t* const start = starts + b * parts + p;
        for (uint32_t number = start[0]; number < start[1]; ++number) {
          *next++ = static_cast<int32_t>(number);
          distinct[number] = *found++;
        }
        const size_t end = bags.at(b, last);
        for (size_t i = bags.at(b, first); i < end; ++i) inverse[i] = given[*which++];
      }
    }
  });
  return starts[samples * parts];
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
      uint64_t any = 0;
      for (size_t i = from; i < to; ++i) any |= ids[i] ^ tag[f];
      differ[f] |= any;
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
      const size_t parts = std::min({fields, threads(), met / kLeastIdsOfPart});
      const bool by_part = count == 1 && parts > 1 && !plan.apart.empty() && plan.apart[0];
      const uint32_t merged = by_part
          ? merge_by_part(ids, {offsets, samples, fields}, parts, inverse, found)
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
