#include "bf16_dot.h"
#include "bf16_linear.h"
#include "generic.h"
#include "generic_rows.h"
#include "isa.h"

namespace kvspan {
Kernel avx512_kernel(Dtype dtype) {
    return dtype == Dtype::bf16 ? flash<Bf16Dot> : generic_kernel(dtype);
}
LinearKernel avx512_linear() { return Bf16Linear::panel; }
const RowKernels& avx512_rows(Dtype dtype) { return generic_rows(dtype); }
}  // namespace kvspan
