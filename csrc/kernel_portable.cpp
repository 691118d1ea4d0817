#include "generic.h"
#include "generic_rows.h"
#include "isa.h"

namespace kvspan {
Kernel portable_kernel(Dtype dtype) { return generic_kernel(dtype); }
const RowKernels& portable_rows(Dtype dtype) { return generic_rows(dtype); }
}  // namespace kvspan
