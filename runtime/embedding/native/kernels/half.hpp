// 16-bit storage of values: fp16 and bf16, rounded stochastically, so that small updates add up.
#pragma once

#include <algorithm>
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

// By a mask: the compiler would branch, and make no vector of it.
inline uint32_t choose(bool first, uint32_t one, uint32_t other) {
  const uint32_t mask = 0u - uint32_t{first};
  return (one & mask) | (other & ~mask);
}

// Rounds up with the probability that makes the mean exact; saturates at 65504; `random` is uniform.
// Every case is computed and one is chosen, so that a vector of values needs no branch.
inline uint32_t to_f16(float value, uint32_t random) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
  const uint32_t rounded = (rest + (random & 0x1FFFu) - 0x38000000u) >> 13;
  const uint32_t normal = std::min(rounded, 0x7BFFu);
  // In units of the smallest subnormal, at most 1024.
  const float scaled = float_of(std::min(rest, 0x38800000u)) * 0x1p24f;
  const auto whole = static_cast<int32_t>(scaled);
  const float part = scaled - static_cast<float>(whole);
  const float drawn = static_cast<float>(static_cast<int32_t>(random & 0xFFFFFFu)) * 0x1p-24f;
  const uint32_t subnormal = static_cast<uint32_t>(whole) + uint32_t{drawn < part};
  uint32_t half = choose(rest >= 0x38800000u, normal, subnormal);
  half = choose(rest >= 0x477FE000u, 0x7BFFu, half);
  return sign | choose(rest > 0x7F800000u, 0x7E00u, half);
}

inline float from_bf16(uint16_t half) { return float_of(uint32_t{half} << 16); }

inline uint32_t to_bf16(float value, uint32_t random) {
  const uint32_t bits = bits_of(value), rest = bits & 0x7FFFFFFFu;
  uint32_t half = (rest >= 0x7F7F0000u ? bits : bits + (random & 0xFFFFu)) >> 16;
  half = rest > 0x7F800000u ? bits >> 16 | 0x40u : half;
  return half;
}

template <size_t D>
inline void load_values(const Options& options, const char* row, float* __restrict out) {
  const size_t dim = D ? D : options.dim;
  const auto* stored = reinterpret_cast<const uint16_t*>(row);  // rows start at even addresses
  if (options.storage == Storage::f16) {
    for (size_t j = 0; j < dim; ++j) out[j] = from_f16(stored[j]);
  } else {
    for (size_t j = 0; j < dim; ++j) out[j] = from_bf16(stored[j]);
  }
}

// The draw is a function of (seed, table, id, version, element).
template <size_t D>
inline void store_values(const Options& options, uint64_t id, uint32_t writes,
                         const float* __restrict values, char* row) {
  const size_t dim = D ? D : options.dim;
  const uint64_t base = embedding::draw(~options.key, id, writes);
  auto* stored = reinterpret_cast<uint16_t*>(row);
  // One width of number in each loop, or the compiler makes vectors of none.
  constexpr size_t kPiece = 16;
  uint32_t random[kPiece], halves[kPiece];
  for (size_t from = 0; from < dim; from += kPiece) {
    const size_t n = D % kPiece == 0 && D ? kPiece : std::min(kPiece, dim - from);
    for (size_t j = 0; j < n; ++j) {
      const uint64_t bits = embedding::mix64(base + (from + j + 1) * embedding::kGolden);
      random[j] = static_cast<uint32_t>(bits >> 32);
    }
    if (options.storage == Storage::f16) {
      for (size_t j = 0; j < n; ++j) halves[j] = to_f16(values[from + j], random[j]);
    } else {
      for (size_t j = 0; j < n; ++j) halves[j] = to_bf16(values[from + j], random[j]);
    }
    for (size_t j = 0; j < n; ++j) stored[from + j] = static_cast<uint16_t>(halves[j]);
  }
}

void load_half(const Options& options, const char* row, float* out) {
  switch (options.dim) {
    case 8: return load_values<8>(options, row, out);
    case 16: return load_values<16>(options, row, out);
    case 32: return load_values<32>(options, row, out);
    case 64: return load_values<64>(options, row, out);
    case 128: return load_values<128>(options, row, out);
    default: return load_values<0>(options, row, out);
  }
}

void store_half(const Options& options, uint64_t id, uint32_t writes, const float* values,
                char* row) {
  store_values<0>(options, id, writes, values, row);
}

}  // namespace
