// Which absent ids get a row: all, some by a seeded draw, or those seen often enough.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hash.hpp"
#include "keeper.hpp"
#include "options.hpp"

namespace embedding {

// Sightings are counted in a count-min sketch of two rows (Cormode and Muthukrishnan 2005): it never
// undercounts, and its memory does not grow with the number of ids that pass by.
class Gate {
 public:
  explicit Gate(const Options& options)
      : options_(options),
        counts_(options.admission == Admission::frequency
                    ? 2 * std::max<uint64_t>(options.admission_counters, 1)
                    : 0) {}

  // One sighting of an absent id in a training lookup of `step`.
  bool admits(uint64_t id, uint32_t step) {
    switch (options_.admission) {
      case Admission::all: return true;
      case Admission::probability:
        return unit(draw(options_.key ^ kSalt, id, step)) < options_.admission_probability;
      case Admission::frequency: break;
    }
    const uint64_t half = counts_.size() / 2;
    const uint64_t first = mix64(id ^ options_.key) % half;
    const uint64_t second = half + mix64(id ^ options_.key ^ kSalt) % half;
    const uint32_t seen = std::min(counts_[first], counts_[second]) + 1u;
    if (seen >= options_.admission_sightings) return true;
    for (const uint64_t counter : {first, second}) {
      keep(counter);
      counts_[counter] = std::max<uint8_t>(counts_[counter], static_cast<uint8_t>(seen));
    }
    return false;
  }

  const std::vector<uint8_t>& counts() const { return counts_; }
  void set_counts(const std::vector<uint8_t>& counts) {
    for (size_t counter = 0; counter < counts_.size(); ++counter) keep(counter);
    counts_ = counts;
  }
  // Who is asked before each change; null: nobody.
  void set_keeper(Keeper* keeper) { keeper_ = keeper; }

 private:
  static constexpr uint64_t kSalt = 0x61646D6974ull;  // any constant: apart from the initial values
  void keep(size_t counter) {
    if (keeper_) keeper_->keep_sightings(counter);
  }

  const Options& options_;
  std::vector<uint8_t> counts_;
  Keeper* keeper_ = nullptr;
};

}  // namespace embedding
