// Who is asked before anything of a table changes: see frozen.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embedding {

class Keeper {
 public:
  virtual void keep(uint32_t slot) = 0;             // before a record or its row changes
  virtual void keep_link(uint32_t slot) = 0;        // before a place in the LRU list changes
  virtual void keep_sightings(size_t counter) = 0;  // before a counter of admission changes

 protected:
  ~Keeper() = default;
};

}  // namespace embedding
