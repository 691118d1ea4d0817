#include "generic.h"
#include "generic_linear.h"
#include "generic_heads.h"
#include "generic_rows.h"
#include "isa.h"

namespace kvspan {
Kernel portable_kernel(Dtype dtype, Dtype stored) { return generic_kernel(dtype, stored); }
double portable_spin(Dtype, std::int64_t rounds) { return spin_floats(rounds); }
LinearKernel portable_linear() { return GenericLinear::panel; }
const RowKernels& portable_rows(Dtype dtype) { return generic_rows(dtype); }
const HeadKernels& portable_heads(Dtype dtype) { return generic_heads(dtype); }
}  // namespace kvspan
