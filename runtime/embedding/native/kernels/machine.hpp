// What the engine takes of the machine: memory that grows, buffers used again, lines of cache
// asked for ahead of their use, and threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <utility>

namespace embedding {

// The error for memory that is not there, with the figures that a user needs.
class OutOfMemory : public std::bad_alloc {
 public:
  OutOfMemory(size_t wanted, size_t in_use, size_t allowed) {
    std::snprintf(text_, sizeof text_,
                  "the rows of one table and shard need %.3g GB beside the %.3g GB of the others, and"
                  " this process may use %.3g GB of memory: give the tables a capacity, use a smaller"
                  " dim, or more memory",
                  static_cast<double>(wanted) / 1e9, static_cast<double>(in_use) / 1e9,
                  static_cast<double>(allowed) / 1e9);
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[256];
};

// One contiguous array of zeroed memory that grows: its pages move to a larger place, uncopied. The
// first 2 MiB use small pages (a small table stays small), the rest asks for huge pages, which random
// row access needs: 1.6 to 1.8 times on 10 M rows (measured 2026-11). Address space is taken in
// steps of twice the size: thousands of tables fit, each as small as its rows. `data()` may change
// in `grow`.
class Pages {
 public:
  Pages() = default;
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }

  // Make the first `bytes` usable, and never more than `most_bytes`; raises OutOfMemory.
  void grow(size_t bytes, size_t most_bytes);
  // Address space for `most_bytes`: as long as no more is asked for, `data()` stays; once, at first.
  void reserve(size_t most_bytes);
  char* data() const { return data_; }

 private:
  void swap(Pages& other) noexcept;
  void charge(size_t bytes, size_t most_bytes);
  bool map(size_t bytes);
  bool take_over(char* old, size_t old_bytes);

  char* data_ = nullptr;
  size_t mapped_ = 0;   // address space
  size_t charged_ = 0;  // of it, what counts as used: what was asked for and an eighth more
};

// Bytes that all pages of this process may take together; the machine's memory until it is set.
void set_memory_limit(size_t bytes);
size_t memory_limit();

// Memory of a batch's arrays. Fresh memory of that size costs a page fault every 4 KiB; a rotating set
// of fresh buffers made training 2.6 times slower (measured 2026-11). So freed buffers are kept,
// touched and, from 2 MiB on, on huge pages. Not zeroed.
void* take_buffer(size_t bytes);
void give_buffer(void* buffer, size_t bytes) noexcept;
size_t idle_buffer_bytes();  // that lie ready to be taken

// One of these for n items.
template <class T>
class Column {
 public:
  explicit Column(size_t n) : data_(static_cast<T*>(take_buffer(n * sizeof(T))), Give{n}) {}
  T* data() { return data_.get(); }
  size_t size() const { return data_.get_deleter().n; }

 private:
  struct Give {
    size_t n;
    void operator()(T* data) const noexcept { give_buffer(data, n * sizeof(T)); }
  };
  std::unique_ptr<T[], Give> data_;
};

// Around a fork, so that the child finds the set in order.
void hold_buffers();
void release_buffers();

// Ask for a cache line ahead of its use, in the first level of cache or only in the second. Not the
// builtin on x86: g++ 12 takes a function that only prefetches for one without effect and drops the
// call, which cost the push three quarters of its speed (measured 2026-11).
template <bool FirstLevel = true>
[[gnu::always_inline]] inline void prefetch(const void* line) {
#if defined(__x86_64__)
  if constexpr (FirstLevel) {
    asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(line)));
  } else {
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
  }
#else
  __builtin_prefetch(line);
#endif
}

// The level for rows. On a Xeon (family 6 model 207) two lines of one aligned 128 bytes cost as much
// as one when they go to the second level, 8 ns against 16 ns by plain requests; on an EPYC the first
// level was 1.2 to 1.4 times faster (measured 2026-11). So it is measured at the first table.
extern bool rows_into_first_level;

[[gnu::always_inline]] inline void prefetch_pair(const void* line) {
  if (rows_into_first_level) {
    prefetch<true>(line);
  } else {
    prefetch<false>(line);
  }
}

// All lines of a row.
[[gnu::always_inline]] inline void prefetch_span(const char* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) prefetch_pair(from + at);
  if (bytes % 64) prefetch_pair(from + bytes - 1);  // rows are not aligned to lines then
}

// Measures that level unless PERSIA_PREFETCH=l1 or l2 says it; takes about 5 ms, once. Throws
// std::invalid_argument for another word.
void settle_prefetch();
std::string prefetch_level();

// Nanoseconds of a row that was fetched into the first level, and into the second, and read a little
// later; both 0 when nothing was measured.
std::tuple<double, double> prefetch_probe();

// Whether this thread, and every thread that it starts from now on, takes numbers too small for a full
// mantissa (denormals) as zero, as input and as result: arithmetic on them is tens of times slower.
// Threads that run already keep their own way, but for the idle ones of OpenMP, which are ended: the
// next parallel call starts new ones. Threads of `share` go by whoever calls. Does nothing on other
// processors than x86-64 and arm64.
void flush_denormals(bool on);
bool flushes_denormals();

// CRC-32C (Castagnoli; RFC 3720, appendix B.4) of some bytes behind those that gave `before`, 0 at
// first: what TCP's own sum of 16 bits lets through is noticed.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before);

// Threads that a kernel call may use, the caller included; 1 at the start.
void set_threads(size_t count);
size_t threads();

// Calls work(from, to) for ranges that cover [0, n), each of `least_per_thread` or more. Runs in the
// caller alone when n is small. Two callers may share work at once, each with all its threads. An
// exception of any range reaches its caller. Results never depend on how many threads there are.
void share(size_t n, size_t least_per_thread, const std::function<void(size_t, size_t)>& work);

}  // namespace embedding
