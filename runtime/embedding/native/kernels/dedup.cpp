#include "dedup.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "hash.hpp"
#include "prefetch.hpp"

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

}  // namespace

size_t merge_duplicates(const uint64_t* ids, size_t n, uint32_t shards, int32_t* inverse,
                        uint64_t* distinct, int64_t* bounds) {
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

}  // namespace embedding
