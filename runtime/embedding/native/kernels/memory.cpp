// Memory: pages that grow uncopied within this process's limit, and buffers that are used again.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "machine.hpp"

namespace embedding {

namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kFirst = size_t{64} << 10;
constexpr size_t kMostIdleBytes = size_t{1} << 30;
constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr int kUse = PROT_READ | PROT_WRITE;

std::atomic<size_t> in_use{0};
std::atomic<size_t> limit{0};

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t round_up(size_t bytes) { return round_up(bytes, bytes > kHuge ? kHuge : kFirst); }

// Address space that starts at a multiple of 2 MiB, or null.
char* aligned_space(size_t bytes) {
  void* raw = mmap(nullptr, bytes + kHuge, PROT_NONE, kPrivate, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(raw);
  char* data = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(start), kHuge));
  if (data > start) munmap(start, data - start);
  char* end = data + bytes;
  if (start + bytes + kHuge > end) munmap(end, start + kHuge - data);
  return data;
}

// Move pages to a fixed place, where they become `new_bytes` long.
bool move(char* from, size_t bytes, char* to, size_t new_bytes) {
  return mremap(from, bytes, new_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

// Four sizes for each power of two: at most a quarter is wasted.
size_t buffer_size(size_t bytes) {
  return bytes <= 4096 ? 4096 : round_up(bytes, std::bit_floor(bytes) / 4);
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

void set_memory_limit(size_t bytes) { limit = bytes; }

size_t memory_limit() {
  if (const size_t set = limit) return set;
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Pages::~Pages() {
  if (data_) munmap(data_, mapped_);
  in_use -= charged_;
}

void Pages::swap(Pages& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(mapped_, other.mapped_);
  std::swap(charged_, other.charged_);
}

void Pages::grow(size_t bytes, size_t most_bytes) {
  if (bytes <= charged_) return;
  const size_t before = charged_;
  charge(bytes, most_bytes);
  if (charged_ <= mapped_) return;
  const size_t twice = round_up(std::max(charged_, std::min(2 * mapped_, most_bytes)));
  if (map(twice) || map(round_up(charged_))) return;
  in_use -= charged_ - before;
  charged_ = before;
  throw OutOfMemory(bytes, in_use - before, memory_limit());
}

void Pages::reserve(size_t most_bytes) {
  if (!map(round_up(most_bytes))) throw OutOfMemory(most_bytes, in_use, memory_limit());
}

void Pages::charge(size_t bytes, size_t most_bytes) {
  const size_t allowed = memory_limit();
  const size_t others = in_use - charged_;
  size_t wanted = std::max(bytes, std::min(round_up(bytes + bytes / 8), most_bytes));
  if (others + wanted > allowed) wanted = bytes;
  if (others + wanted > allowed) throw OutOfMemory(bytes, others, allowed);
  in_use += wanted - charged_;
  charged_ = wanted;
}

// Give the array `bytes` of address space, more than it has.
bool Pages::map(size_t bytes) {
  char* old = data_;
  const size_t old_bytes = mapped_;
  char* fresh;
  if (bytes <= kHuge) {
    void* raw = mmap(nullptr, bytes, kUse, kPrivate, -1, 0);
    if (raw == MAP_FAILED) return false;
    fresh = static_cast<char*>(raw);
    madvise(fresh, bytes, MADV_NOHUGEPAGE);  // best effort, like all of them
  } else {
    fresh = aligned_space(bytes);
    if (!fresh) return false;
    if (mprotect(fresh, bytes, kUse) != 0) {
      munmap(fresh, bytes);
      return false;
    }
    madvise(fresh, kHuge, MADV_NOHUGEPAGE);
    madvise(fresh + kHuge, bytes - kHuge, MADV_HUGEPAGE);
  }
  data_ = fresh;
  mapped_ = bytes;
  if (old && !take_over(old, old_bytes)) {
    std::memcpy(data_, old, old_bytes);
    munmap(old, old_bytes);
  }
  return true;
}

// The old pages become the start of the new array. Each of its two kinds of pages is one piece for
// the kernel, and stays one because it is made as long as the new piece while it moves.
bool Pages::take_over(char* old, size_t old_bytes) {
  const size_t small = std::min(old_bytes, kHuge), new_small = std::min(mapped_, kHuge);
  if (old_bytes > kHuge &&
      !move(old + kHuge, old_bytes - kHuge, data_ + kHuge, mapped_ - kHuge)) {
    return false;
  }
  if (move(old, small, data_, new_small)) return true;
  std::memcpy(data_, old, small);  // the larger piece has moved already
  munmap(old, small);
  return true;
}

void* take_buffer(size_t bytes) {
  const size_t size = buffer_size(bytes);
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
  void* buffer = std::aligned_alloc(unit, round_up(size, unit));
  if (!buffer) throw std::bad_alloc();
  if (size >= kHuge) madvise(buffer, size / kHuge * kHuge, MADV_HUGEPAGE);
  return buffer;
}

void give_buffer(void* buffer, size_t bytes) noexcept {
  const size_t size = buffer_size(bytes);
  Idle& all = idle();
  const std::scoped_lock hold(all.lock);
  try {
    if (all.bytes + size <= kMostIdleBytes) {
      all.free[size].push_back(buffer);
      all.bytes += size;
      return;
    }
  } catch (const std::bad_alloc&) {  // no memory to note it
  }
  std::free(buffer);
}

void hold_buffers() { idle().lock.lock(); }
void release_buffers() { idle().lock.unlock(); }

size_t idle_buffer_bytes() {
  Idle& all = idle();
  const std::scoped_lock hold(all.lock);
  return all.bytes;
}

}  // namespace embedding
