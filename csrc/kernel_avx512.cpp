#include "bf16_dot.h"
#include "generic.h"
#include "isa.h"

namespace kvspan {
Kernel avx512_kernel(Dtype dtype) {
    return dtype == Dtype::bf16 ? flash<Bf16Dot> : generic_kernel(dtype);
}
}  // namespace kvspan
