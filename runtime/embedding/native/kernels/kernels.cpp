// Compiled once per instruction set; KERNEL_SET is scalar, avx2 or avx512.
#include "kernels.hpp"
#include "optimizers.hpp"
#include "pooling.hpp"

#define JOIN(a, b) a##b
#define NAMED(set) JOIN(kernels_, set)
#define TEXT(set) #set
#define QUOTED(set) TEXT(set)

namespace embedding {

extern const Kernels NAMED(KERNEL_SET);
const Kernels NAMED(KERNEL_SET) = {QUOTED(KERNEL_SET), step_rows, pool, scatter, load_half,
                                   store_half};

}  // namespace embedding
