#include "probe.hpp"

#include <sys/mman.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "hash.hpp"
#include "prefetch.hpp"

namespace embedding {

bool rows_into_first_level = false;

namespace {

constexpr size_t kRow = 128;
constexpr size_t kBytes = size_t{2} << 20;
constexpr size_t kRows = kBytes / kRow;
constexpr size_t kTurn = 512;  // rows of one level before the other has its turn
constexpr size_t kAhead = 16;
constexpr double kWorth = 0.95;  // the first level must be clearly faster

std::once_flag settled;
Probe found;

void choose(const std::string& level) {
  if (level != "l1" && level != "l2") {
    throw std::invalid_argument("PERSIA_PREFETCH must be l1 or l2, got '" + level +
                                "'; leave it away to let the engine measure");
  }
  rows_into_first_level = level == "l1";
}

void forget(const char* rows) {
#if defined(__x86_64__)
  for (size_t at = 0; at < kBytes; at += 64) _mm_clflush(rows + at);
  _mm_mfence();
#endif
}

// An odd factor goes once through all rows, in an order that no hardware prefetcher knows.
size_t row_at(size_t i) { return (i * (kGolden >> 32 | 1)) % kRows * kRow; }

template <bool First>
uint32_t walk(const char* rows, size_t from) {
  uint32_t sum = 0;
  for (size_t i = from; i < from + kTurn; ++i) {
    for (size_t line = 0; line < kRow; line += 64) {
      const char* next = rows + row_at(i + kAhead) + line;
      if (First) {
        prefetch(next);
      } else {
        prefetch_second(next);
      }
    }
    uint32_t one, other;
    std::memcpy(&one, rows + row_at(i), sizeof one);
    std::memcpy(&other, rows + row_at(i) + 64, sizeof other);
    sum += one + other;
  }
  return sum;
}

void measure() {
  void* memory = std::aligned_alloc(size_t{2} << 20, kBytes);
  if (!memory) return;
  madvise(memory, kBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kBytes);
  const char* rows = static_cast<const char*>(memory);
  forget(rows);
  using Clock = std::chrono::steady_clock;
  double ns[2] = {1e9, 1e9};
  volatile uint32_t sink = 0;
  for (size_t from = 0, turn = 0; from + kTurn <= kRows; from += kTurn, ++turn) {
    const auto began = Clock::now();
    sink = sink + (turn % 2 ? walk<false>(rows, from) : walk<true>(rows, from));
    const std::chrono::duration<double, std::nano> took = Clock::now() - began;
    double& least = ns[turn % 2];  // others on the machine only ever add
    if (took.count() / kTurn < least) least = took.count() / kTurn;
  }
  std::free(memory);
  found = {ns[0], ns[1]};
  rows_into_first_level = ns[0] < kWorth * ns[1];
}

}  // namespace

void settle_prefetch() {
  std::call_once(settled, [] {
    if (const char* level = std::getenv("PERSIA_PREFETCH")) {
      choose(level);
    } else {
      measure();
    }
  });
}

void choose_prefetch(const std::string& level) {
  std::call_once(settled, [] {});
  choose(level);
}

std::string prefetch_level() {
  settle_prefetch();
  return rows_into_first_level ? "l1" : "l2";
}

Probe prefetch_probe() { return found; }

}  // namespace embedding
