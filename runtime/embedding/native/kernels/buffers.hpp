// Memory of a batch's arrays, used again when the arrays are gone.
#pragma once

#include <cstddef>

namespace embedding {

// Fresh memory of the size of a batch costs a page fault every 4 KiB; a rotating set of fresh buffers
// made training 2.6 times slower (measured 2026-11). So freed buffers are kept, touched and, from
// 2 MiB on, on huge pages. Not zeroed.
void* take_buffer(size_t bytes);
void give_buffer(void* buffer, size_t bytes) noexcept;

// Around a fork, so that the child finds the set in order.
void hold_buffers();
void release_buffers();

// Bytes that lie ready to be taken.
size_t idle_buffer_bytes();

}  // namespace embedding
