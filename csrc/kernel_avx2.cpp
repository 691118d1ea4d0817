#include "generic.h"
#include "generic_rows.h"
#include "isa.h"

namespace kvspan {
Kernel avx2_kernel(Dtype dtype, Dtype stored) { return generic_kernel(dtype, stored); }
const RowKernels& avx2_rows(Dtype dtype) { return generic_rows(dtype); }
}  // namespace kvspan
