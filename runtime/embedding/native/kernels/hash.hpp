// Hashing of ids: the same bits as runtime.data.ids.mix64 and runtime.embedding.shard.shard_of.
#pragma once

#include <cstdint>

namespace embedding {

inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;  // 2**64 / golden ratio

// A bijection that spreads every bit (the finaliser of splitmix64, Steele 2014).
inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline uint32_t shard_of(uint64_t hash, uint32_t shards) {
  return static_cast<uint32_t>((hash >> 32) % shards);
}

// 64 random bits: draw number `counter` of the stream that belongs to `id` under `key`.
inline uint64_t draw(uint64_t key, uint64_t id, uint64_t counter) {
  return mix64(mix64(id ^ key) + (counter + 1) * kGolden);
}

// Uniform in [0, 1) from the upper 53 bits.
inline double unit(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace embedding
