// Which level of cache to fetch rows into: measured once, on this machine.
#pragma once

#include <string>

namespace embedding {

struct Probe {
  double first_ns = 0;   // a row fetched into the first level, read a little later
  double second_ns = 0;  // into the second; both 0 when nothing was measured
};

// Measures unless the level is chosen already, by a call or by PERSIA_PREFETCH=l1 or l2; takes about 5 ms,
// once. Throws std::invalid_argument for another word.
void settle_prefetch();
void choose_prefetch(const std::string& level);
std::string prefetch_level();
Probe prefetch_probe();

}  // namespace embedding
