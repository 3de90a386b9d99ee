// Initial values: a pure function of (seed, table, id, element), as tests/oracles/reference/initial.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "hash.hpp"
#include "options.hpp"

namespace embedding {

// Numbers of one element: its own stream of uniform draws.
class Draws {
 public:
  Draws(uint64_t key, uint64_t id, uint64_t element) : stream_(draw(key, id, element)) {}
  double unit() { return embedding::unit(mix64(stream_ + ++count_ * kGolden)); }
  // In (0, 1]: safe under a logarithm.
  double positive() { return 1.0 - unit(); }
  // Box and Muller (1958), the cosine branch.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(positive()));
    return radius * std::cos(2.0 * std::numbers::pi * unit());
  }
  // Marsaglia and Tsang (2000); a shape below 1 by the boost U**(1 / shape).
  double gamma(double shape) {
    if (shape < 1) {
      const double boost = std::pow(positive(), 1.0 / shape);
      return gamma(shape + 1) * boost;
    }
    const double d = shape - 1.0 / 3.0, c = 1.0 / std::sqrt(9.0 * d);
    for (;;) {
      const double x = normal(), root = 1.0 + c * x;
      if (root <= 0) continue;
      const double v = root * root * root;
      if (std::log(positive()) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
    }
  }
  // Knuth's product of uniforms: fit for the small rates that make sense here.
  double poisson(double rate) {
    const double limit = std::exp(-rate);
    double product = positive(), count = 0;
    while (product > limit) {
      product *= positive();
      ++count;
    }
    return count;
  }

 private:
  uint64_t stream_;
  uint64_t count_ = 0;
};

template <class T>
void fill_initial(const Options& options, uint64_t id, T* values) {
  const uint64_t base = mix64(id ^ options.key);
  if (options.initial == Initial::uniform) {
    for (uint64_t j = 0; j < options.dim; ++j) {
      const uint64_t bits = mix64(base + (j + 1) * kGolden) >> 11;
      values[j] = static_cast<T>((static_cast<double>(bits) * 0x1p-52 - 1.0) * options.initial_a);
    }
    return;
  }
  for (uint64_t j = 0; j < options.dim; ++j) {
    Draws draws(options.key, id, j);
    double value = options.initial_a;
    if (options.initial == Initial::normal) value += options.initial_b * draws.normal();
    if (options.initial == Initial::gamma) value = options.initial_b * draws.gamma(value);
    if (options.initial == Initial::poisson) value = draws.poisson(value);
    values[j] = static_cast<T>(value);
  }
}

}  // namespace embedding
