// The distinct ids of a batch, grouped by shard, in the order of first appearance within a shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffers.hpp"

namespace embedding {

struct Distinct {
  Column<uint64_t> ids{0};        // [U], grouped by shard
  std::vector<int64_t> bounds;    // [shards + 1]
};

// Fills `found`, and inverse [n]: which distinct id each of `ids` [n] is. Scratch is kept per thread.
void merge_duplicates(const uint64_t* ids, size_t n, uint32_t shards, int32_t* inverse,
                      Distinct& found);

}  // namespace embedding
