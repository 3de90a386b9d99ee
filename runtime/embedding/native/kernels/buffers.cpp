#include "buffers.hpp"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <vector>

namespace embedding {

namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kMostIdleBytes = size_t{1} << 30;

// Four sizes for each power of two: at most a quarter is wasted.
size_t rounded(size_t bytes) {
  if (bytes <= 4096) return 4096;
  const size_t step = std::bit_floor(bytes) / 4;
  return (bytes + step - 1) / step * step;
}

struct Idle {
  std::mutex lock;
  std::map<size_t, std::vector<void*>> free;
  size_t bytes = 0;
};

Idle& idle() {
  static Idle* one = new Idle;  // never destroyed: arrays may be freed after static destructors
  return *one;
}

}  // namespace

void* take_buffer(size_t bytes) {
  const size_t size = rounded(bytes);
  Idle& all = idle();
  {
    const std::scoped_lock hold(all.lock);
    std::vector<void*>& free = all.free[size];
    if (!free.empty()) {
      void* buffer = free.back();
      free.pop_back();
      all.bytes -= size;
      return buffer;
    }
  }
  const size_t unit = size >= kHuge ? kHuge : 64;
  void* buffer = std::aligned_alloc(unit, (size + unit - 1) / unit * unit);
  if (!buffer) throw std::bad_alloc();
  if (size >= kHuge) madvise(buffer, size / kHuge * kHuge, MADV_HUGEPAGE);  // best effort
  return buffer;
}

void give_buffer(void* buffer, size_t bytes) noexcept {
  const size_t size = rounded(bytes);
  Idle& all = idle();
  const std::scoped_lock hold(all.lock);
  if (all.bytes + size > kMostIdleBytes) {
    std::free(buffer);
    return;
  }
  try {
    all.free[size].push_back(buffer);
    all.bytes += size;
  } catch (const std::bad_alloc&) {
    std::free(buffer);
  }
}

void hold_buffers() { idle().lock.lock(); }
void release_buffers() { idle().lock.unlock(); }

size_t idle_buffer_bytes() {
  Idle& all = idle();
  const std::scoped_lock hold(all.lock);
  return all.bytes;
}

}  // namespace embedding
