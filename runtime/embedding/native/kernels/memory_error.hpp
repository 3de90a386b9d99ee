// The error for memory that is not there, with the figures that a user needs.
#pragma once

#include <cstddef>
#include <cstdio>
#include <new>

namespace embedding {

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

}  // namespace embedding
