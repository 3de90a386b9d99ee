// Memory of a batch's arrays, used again when the arrays are gone.
#pragma once

#include <cstddef>
#include <utility>

namespace embedding {

// Fresh memory of the size of a batch costs a page fault every 4 KiB; a rotating set of fresh buffers
// made training 2.6 times slower (measured 2026-11). So freed buffers are kept, touched and, from
// 2 MiB on, on huge pages. Not zeroed.
void* take_buffer(size_t bytes);
void give_buffer(void* buffer, size_t bytes) noexcept;

// One of these for n items.
template <class T>
class Column {
 public:
  explicit Column(size_t n) : data_(static_cast<T*>(take_buffer(n * sizeof(T)))), n_(n) {}
  ~Column() {
    if (data_) give_buffer(data_, bytes());
  }
  Column(Column&& other) noexcept : data_(other.data_), n_(other.n_) { other.data_ = nullptr; }
  Column& operator=(Column&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_, other.n_);
    return *this;
  }
  T* data() { return data_; }
  size_t size() const { return n_; }
  size_t bytes() const { return n_ * sizeof(T); }

 private:
  T* data_;
  size_t n_;
};

// Around a fork, so that the child finds the set in order.
void hold_buffers();
void release_buffers();

// Bytes that lie ready to be taken.
size_t idle_buffer_bytes();

}  // namespace embedding
