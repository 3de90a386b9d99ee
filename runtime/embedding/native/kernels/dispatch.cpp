// Which instruction set runs: the widest that the processor has.
#include <atomic>
#include <cstring>

#include "kernels.hpp"

namespace embedding {

extern const Kernels kernels_scalar;
#ifdef EMBEDDING_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

const Kernels* find(const char* name) {
#ifdef EMBEDDING_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && (!name || std::strcmp(name, "avx512") == 0)) return &kernels_avx512;
  if (avx2 && (!name || std::strcmp(name, "avx2") == 0)) return &kernels_avx2;
#endif
  return !name || std::strcmp(name, "scalar") == 0 ? &kernels_scalar : nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* set = chosen.load(std::memory_order_acquire);
  if (!set) chosen.store(set = find(nullptr), std::memory_order_release);
  return *set;
}

bool choose_kernels(const char* name) {
  const Kernels* set = find(name);
  if (set) chosen.store(set, std::memory_order_release);
  return set != nullptr;
}

}  // namespace embedding
