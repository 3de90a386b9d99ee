#include "dedup.hpp"

#include <algorithm>

#include "hash.hpp"
#include "prefetch.hpp"

namespace embedding {

namespace {

constexpr size_t kAhead = 16;  // ids between prefetch and probe

// A hash table from id to its number, cleared by a new epoch instead of a sweep.
class Scratch {
 public:
  struct Entry {
    uint64_t id;
    uint32_t number;
    uint32_t epoch;
  };

  void start(size_t expected) {
    size_t size = 1024;
    while (size < 2 * expected) size *= 2;
    if (size > entries_.size() || size * 16 < entries_.size()) {
      entries_.assign(size, Entry{0, 0, 0});
      epoch_ = 0;
    }
    if (++epoch_ == 0) {
      std::fill(entries_.begin(), entries_.end(), Entry{0, 0, 0});
      epoch_ = 1;
    }
    mask_ = entries_.size() - 1;
    used_ = 0;
  }

  void prefetch(uint64_t hash) const { embedding::prefetch(&entries_[hash & mask_]); }
  bool crowded() const { return 3 * used_ > 2 * entries_.size(); }

  // The number of `id`; `next` becomes it when the id is new, and then `fresh` is set.
  uint32_t number(uint64_t id, uint64_t hash, uint32_t next, bool& fresh) {
    for (size_t at = hash & mask_;; at = (at + 1) & mask_) {
      Entry& entry = entries_[at];
      if (entry.epoch != epoch_) {
        entry = {id, next, epoch_};
        ++used_;
        fresh = true;
        return next;
      }
      if (entry.id == id) return entry.number;
    }
  }

  void grow(const std::vector<uint64_t>& ids) {
    entries_.assign(2 * entries_.size(), Entry{0, 0, 0});
    mask_ = entries_.size() - 1;
    epoch_ = 1;
    used_ = 0;
    bool fresh;
    for (uint32_t i = 0; i < ids.size(); ++i) number(ids[i], mix64(ids[i]), i, fresh);
  }

 private:
  std::vector<Entry> entries_;
  size_t mask_ = 0;
  size_t used_ = 0;
  uint32_t epoch_ = 0;
};

}  // namespace

Distinct merge_duplicates(const uint64_t* ids, size_t n, uint32_t shards, int32_t* inverse) {
  static thread_local Scratch scratch;
  static thread_local std::vector<uint32_t> shard;
  Distinct found;
  scratch.start(n / 2);
  found.ids.reserve(n / 2 + 1);
  shard.clear();
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) scratch.prefetch(mix64(ids[i + kAhead]));
    const uint64_t hash = mix64(ids[i]);
    bool fresh = false;
    const auto next = static_cast<uint32_t>(found.ids.size());
    inverse[i] = static_cast<int32_t>(scratch.number(ids[i], hash, next, fresh));
    if (fresh) {
      found.ids.push_back(ids[i]);
      if (shards > 1) shard.push_back(shard_of(hash, shards));
      if (scratch.crowded()) scratch.grow(found.ids);
    }
  }
  found.bounds.assign(shards + 1, 0);
  if (shards == 1) {
    found.bounds[1] = static_cast<int64_t>(found.ids.size());
    return found;
  }
  // A stable counting sort by shard.
  for (uint32_t s : shard) ++found.bounds[s + 1];
  for (uint32_t s = 0; s < shards; ++s) found.bounds[s + 1] += found.bounds[s];
  std::vector<int64_t> next(found.bounds.begin(), found.bounds.end() - 1);
  std::vector<uint64_t> grouped(found.ids.size());
  std::vector<int32_t> place(found.ids.size());
  for (size_t u = 0; u < found.ids.size(); ++u) {
    const int64_t to = next[shard[u]]++;
    grouped[to] = found.ids[u];
    place[u] = static_cast<int32_t>(to);
  }
  for (size_t i = 0; i < n; ++i) inverse[i] = place[inverse[i]];
  found.ids.swap(grouped);
  return found;
}

}  // namespace embedding
