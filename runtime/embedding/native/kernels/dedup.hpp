// The distinct ids of a batch, grouped by shard, in the order of first appearance within a shard.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embedding {

// Which distinct ids `ids` [n] holds: they go to `distinct` (room for n), inverse [n] says which one
// each is, bounds [shards + 1] where those of a shard start. Returns how many. Scratch is kept per
// thread.
size_t merge_duplicates(const uint64_t* ids, size_t n, uint32_t shards, int32_t* inverse,
                        uint64_t* distinct, int64_t* bounds);

}  // namespace embedding
