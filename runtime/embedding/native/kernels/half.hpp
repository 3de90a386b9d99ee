// 16-bit storage of values: fp16 and bf16, rounded stochastically, so that small updates add up.
#pragma once

#include <cstdint>
#include <cstring>

#include "hash.hpp"
#include "options.hpp"

namespace {  // compiled once per instruction set: never merged across them

using embedding::Options;
using embedding::Storage;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float from_f16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, rest = half & 0x7FFFu;
  // Shift exponent and fraction into place and undo the difference of biases (127 - 15) by a product:
  // right for subnormal numbers too. No infinities are ever stored.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

// Rounds up with the probability that makes the mean exact; saturates at 65504; `random` is uniform.
inline uint16_t to_f16(float value, uint32_t random) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (rest >= 0x477FE000u) return static_cast<uint16_t>(sign | 0x7BFFu);
  if (rest >= 0x38800000u) {
    const uint32_t rounded = (rest + (random & 0x1FFFu) - 0x38000000u) >> 13;
    return static_cast<uint16_t>(sign | (rounded > 0x7BFFu ? 0x7BFFu : rounded));
  }
  const float scaled = float_of(rest) * 0x1p24f;  // in units of the smallest subnormal, < 1024
  const uint32_t whole = static_cast<uint32_t>(scaled);
  const float part = scaled - static_cast<float>(whole);
  const bool up = static_cast<float>(random & 0xFFFFFFu) * 0x1p-24f < part;
  return static_cast<uint16_t>(sign | (whole + up));
}

inline float from_bf16(uint16_t half) { return float_of(uint32_t{half} << 16); }

inline uint16_t to_bf16(float value, uint32_t random) {
  const uint32_t bits = bits_of(value), rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  if (rest >= 0x7F7F0000u) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>((bits + (random & 0xFFFFu)) >> 16);
}

void load_half(const Options& options, const char* row, float* out) {
  uint16_t half;
  for (size_t j = 0; j < options.dim; ++j) {
    std::memcpy(&half, row + 2 * j, sizeof half);
    out[j] = options.storage == Storage::f16 ? from_f16(half) : from_bf16(half);
  }
}

// The draw is a function of (seed, table, id, version, element).
void store_half(const Options& options, uint64_t id, uint32_t writes, const float* values,
                char* row) {
  const uint64_t base = embedding::draw(~options.key, id, writes);
  for (size_t j = 0; j < options.dim; ++j) {
    const auto random =
        static_cast<uint32_t>(embedding::mix64(base + (j + 1) * embedding::kGolden) >> 32);
    const uint16_t half = options.storage == Storage::f16 ? to_f16(values[j], random)
                                                          : to_bf16(values[j], random);
    std::memcpy(row + 2 * j, &half, sizeof half);
  }
}

}  // namespace
