#include "generic.h"
#include "generic_linear.h"
#include "generic_heads.h"
#include "generic_rows.h"
#include "isa.h"

namespace kvspan {
Kernel avx2_kernel(Dtype dtype, Dtype stored) { return generic_kernel(dtype, stored); }
double avx2_spin(Dtype, std::int64_t rounds) { return spin_floats(rounds); }
LinearKernel avx2_linear() { return GenericLinear::panel; }
const RowKernels& avx2_rows(Dtype dtype) { return generic_rows(dtype); }
const HeadKernels& avx2_heads(Dtype dtype) { return generic_heads(dtype); }
}  // namespace kvspan
