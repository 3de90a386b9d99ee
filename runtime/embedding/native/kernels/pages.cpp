#include "pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

namespace embedding {

namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kFirst = size_t{64} << 10;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

size_t machine_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Pages::Pages(size_t most_bytes) : reserved_(round_up(std::max<size_t>(most_bytes, 1), kHuge)) {
  // PROT_NONE costs nothing under any overcommit policy; one huge page more to align the start.
  const size_t mapped = reserved_ + kHuge;
  void* raw = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(raw);
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(start), kHuge));
  if (data_ > start) munmap(start, data_ - start);
  char* end = data_ + reserved_;
  if (start + mapped > end) munmap(end, start + mapped - end);
}

Pages::~Pages() {
  if (data_) munmap(data_, reserved_);
}

void Pages::swap(Pages& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(reserved_, other.reserved_);
  std::swap(usable_, other.usable_);
}

void Pages::grow(size_t bytes) {
  if (bytes <= usable_) return;
  if (bytes > reserved_) throw std::bad_alloc();
  // Usable is not resident: a step may be generous.
  const size_t wanted = std::max(bytes + bytes / 8, kFirst);
  const size_t target = std::min(wanted > kHuge ? round_up(wanted, kHuge) : round_up(wanted, kFirst),
                                 reserved_);
  if (mprotect(data_, target, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  if (target > kHuge) madvise(data_ + kHuge, target - kHuge, MADV_HUGEPAGE);  // best effort
  usable_ = target;
}

}  // namespace embedding
