// Gradients of a push by the row that they are for, rows in the order of first appearance.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hash.hpp"

namespace embedding {

// Each row's gradients hang in a chain, in their own order. A row is known by its slot, so that finding
// its chain needs no hash of an id and no look at one. Memory is kept from push to push.
class Chains {
 public:
  static constexpr uint32_t kEnd = 0xFFFFFFFFu;

  void link(const uint32_t* slots, size_t n) {
    size_t size = 1024;
    while (size < 2 * n) size *= 2;
    table_.assign(size, kEnd);
    const int shift = 64 - __builtin_ctzll(size);
    next_.resize(std::max(next_.size(), n));
    rows_.clear();
    for (uint32_t i = 0; i < n; ++i) {
      next_[i] = kEnd;
      size_t at = uint64_t{slots[i]} * kGolden >> shift;
      while (table_[at] != kEnd && slots[rows_[table_[at]].first] != slots[i]) {
        at = at + 1 == size ? 0 : at + 1;
      }
      if (table_[at] == kEnd) {
        table_[at] = static_cast<uint32_t>(rows_.size());
        rows_.push_back({i, i});
      } else {
        Row& row = rows_[table_[at]];
        next_[row.last] = i;
        row.last = i;
      }
    }
  }

  size_t size() const { return rows_.size(); }
  uint32_t first(size_t row) const { return rows_[row].first; }
  uint32_t next(uint32_t gradient) const { return next_[gradient]; }

 private:
  struct Row {
    uint32_t first, last;
  };
  std::vector<uint32_t> table_;  // numbers of rows, by slot
  std::vector<uint32_t> next_;
  std::vector<Row> rows_;
};

}  // namespace embedding
