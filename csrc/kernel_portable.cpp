#include "generic.h"
#include "isa.h"

namespace kvspan {
Kernel portable_kernel(Dtype dtype) { return generic_kernel(dtype); }
}  // namespace kvspan
