// Rows that travel as float16, rounded to the nearest. A part of kernels.cpp, the only file that includes it: compiled once per
// instruction set, so nothing here may be merged across them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels.hpp"

namespace embedding {

namespace {

// Of rows that travel as float16: scaled to below 2**15, for the largest float16 is nearly 2**16; and
// the exponent of the smallest scale.
constexpr int kTopScale = 15, kLeastScale = -100;

// Calls body<D>() with the usual widths of rows as constants, for the others with 0.
template <class Body>
void by_dim(size_t dim, Body body) {
  switch (dim) {
    case 8: return body.template operator()<8>();
    case 16: return body.template operator()<16>();
    case 32: return body.template operator()<32>();
    case 64: return body.template operator()<64>();
    case 128: return body.template operator()<128>();
    default: return body.template operator()<0>();
  }
}

inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// By a mask: the compiler would branch, and make no vector of it.
inline uint32_t choose(bool first, uint32_t one, uint32_t other) {
  const uint32_t mask = 0u - uint32_t{first};
  return (one & mask) | (other & ~mask);
}

// float16 for the wire: rounded to the nearest, ties to even, as numpy casts. Where both are there, float
// is told from double by what its bits are.

template <class T>
struct Format;
template <>
struct Format<float> {
  using Bits = uint32_t;
  static constexpr int kFraction = 23, kBias = 127;
  static constexpr float kSubnormal = 0.5f;  // its last bit is that of the smallest float16
};
template <>
struct Format<double> {
  using Bits = uint64_t;
  static constexpr int kFraction = 52, kBias = 1023;
  static constexpr double kSubnormal = 0x1p28;
};

// Every case is computed and one is chosen, so that a vector of values needs no branch.
template <class T>
inline uint16_t nearest_f16(T value) {
  using F = Format<T>;
  using Bits = typename F::Bits;
  constexpr int kShift = F::kFraction - 10;
  constexpr Bits kOne = 1, kInfinite = (2 * kOne * F::kBias + 1) << F::kFraction;
  constexpr Bits kBiases = static_cast<Bits>(F::kBias - 15) << F::kFraction;
  constexpr Bits kNormal = kBiases + (kOne << F::kFraction);  // 2**-14
  constexpr Bits kTop = std::bit_cast<Bits>(T{65520});        // half of the way to 2**16
  const Bits bits = std::bit_cast<Bits>(value), rest = bits & ~(kOne << (sizeof(T) * 8 - 1));
  const Bits normal = (rest + (kOne << (kShift - 1)) - 1 + (rest >> kShift & 1) - kBiases) >> kShift;
  const T small = std::bit_cast<T>(std::min(rest, kNormal));
  const Bits subnormal = std::bit_cast<Bits>(small + F::kSubnormal) -
                         std::bit_cast<Bits>(F::kSubnormal);
  const auto pick = [](bool first, Bits one, Bits other) {
    const Bits mask = Bits{0} - Bits{first};
    return (one & mask) | (other & ~mask);
  };
  Bits half = pick(rest >= kNormal, normal, subnormal);
  half = pick(rest >= kTop, 0x7C00, half);
  half = pick(rest > kInfinite, 0x7C00 | (rest >> kShift & 0x3FF), half);
  return static_cast<uint16_t>((bits >> (sizeof(T) * 8 - 16) & 0x8000) | half);
}

inline float any_from_f16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, rest = half & 0x7FFFu;
  const uint32_t finite = bits_of(float_of(rest << 13) * 0x1p112f);
  return float_of(sign | choose(rest >= 0x7C00u, 0x7F800000u | rest << 13, finite));
}

// Two to this power; built of its bits where it is a normal number.
template <class T>
inline T power_of_two(int exponent) {
  using F = Format<T>;
  using Bits = typename F::Bits;
  if (exponent <= -F::kBias || exponent > F::kBias) return std::ldexp(T{1}, exponent);
  return std::bit_cast<T>(static_cast<Bits>(exponent + F::kBias) << F::kFraction);
}

// The exponent of the power of two above a row's largest number, once that is rounded.
template <class T, size_t D>
inline int scale_of(const T* numbers, size_t count) {
  using F = Format<T>;
  using Bits = typename F::Bits;
  const size_t n = D ? D : count;
  constexpr Bits kOne = 1, kSign = kOne << (sizeof(T) * 8 - 1);
  Bits largest = 0;
  for (size_t j = 0; j < n; ++j) {
    largest = std::max(largest, std::bit_cast<Bits>(numbers[j]) & ~kSign);
  }
  const Bits exponent = largest >> F::kFraction, fraction = largest & ((kOne << F::kFraction) - 1);
  if (largest == 0) return 0;
  if (exponent == Bits{2} * F::kBias + 1) return fraction == 0;  // an infinity is rounded up, a NaN not
  const bool up = fraction >= (kOne << F::kFraction) - (kOne << (F::kFraction - 11));
  return std::max(static_cast<int>(exponent) - F::kBias + 1 + up, kLeastScale);
}

template <class T, class Row>
void each_half_row(const HalfRows& call, Row row) {
  size_t at = 0;
  for (size_t i = 0; i < call.n; ++i) {
    const auto count = static_cast<size_t>(call.sizes[i]);
    by_dim(count, [&]<size_t D>() { row.template operator()<D>(i, at, count); });
    at += count;
  }
}

template <class T>
void halve_rows(const HalfRows& call) {
  const T* numbers = static_cast<const T*>(call.numbers);
  each_half_row<T>(call, [&]<size_t D>(size_t i, size_t at, size_t count) {
    const size_t n = D ? D : count;
    const int scale = scale_of<T, D>(numbers + at, count);
    const T factor = power_of_two<T>(kTopScale - scale);
    for (size_t j = 0; j < n; ++j) call.halves[at + j] = nearest_f16<T>(numbers[at + j] * factor);
    call.scales[i] = static_cast<int16_t>(scale);
  });
}

template <class T>
void unhalve_rows(const HalfRows& call) {
  T* numbers = static_cast<T*>(call.numbers);
  each_half_row<T>(call, [&]<size_t D>(size_t i, size_t at, size_t count) {
    const size_t n = D ? D : count;
    const T factor = power_of_two<T>(call.scales[i] - kTopScale);
    for (size_t j = 0; j < n; ++j) {
      numbers[at + j] = static_cast<T>(any_from_f16(call.halves[at + j])) * factor;
    }
  });
}

template <class T>
void round_rows(const HalfRows& call) {
  const T* numbers = static_cast<const T*>(call.numbers);
  T* rounded = static_cast<T*>(call.rounded);
  each_half_row<T>(call, [&]<size_t D>(size_t, size_t at, size_t count) {
    const size_t n = D ? D : count;
    const int scale = scale_of<T, D>(numbers + at, count);
    const T there = power_of_two<T>(kTopScale - scale), back = power_of_two<T>(scale - kTopScale);
    for (size_t j = 0; j < n; ++j) {
      const uint16_t half = nearest_f16<T>(numbers[at + j] * there);
      rounded[at + j] = static_cast<T>(any_from_f16(half)) * back;
    }
  });
}

void to_half(const HalfRows& call) {
  call.wide ? halve_rows<double>(call) : halve_rows<float>(call);
}

void from_half(const HalfRows& call) {
  call.wide ? unhalve_rows<double>(call) : unhalve_rows<float>(call);
}

void round_half(const HalfRows& call) {
  call.wide ? round_rows<double>(call) : round_rows<float>(call);
}

}  // namespace

}  // namespace embedding
