#include "generic.h"
#include "isa.h"

namespace kvspan {
Kernel avx2_kernel(Dtype dtype) { return generic_kernel(dtype); }
}  // namespace kvspan
