// A few threads that share one kernel call by ranges; results never depend on how many there are.
#pragma once

#include <cstddef>
#include <functional>

namespace embedding {

// Threads that a kernel call may use, the caller included; 1 at the start.
void set_threads(size_t count);
size_t threads();

// Calls work(from, to) for consecutive ranges that cover [0, n). Runs in the caller alone when n is
// small, or when another caller is using the threads. An exception of any range reaches the caller.
void share(size_t n, size_t least_per_thread, const std::function<void(size_t, size_t)>& work);

}  // namespace embedding
