#include "bf16_dot.h"
#include "bf16_linear.h"
#include "generic.h"
#include "generic_heads.h"
#include "generic_rows.h"
#include "isa.h"

namespace kvspan {
Kernel avx512_kernel(Dtype dtype, Dtype stored) {
    if (dtype != Dtype::bf16) return generic_kernel(dtype, stored);
    switch (stored) {
        case Dtype::i8:
            return flash<Bf16Dot<CodeCells<I8>>>;
        case Dtype::e4m3:
            return flash<Bf16Dot<CodeCells<E4m3>>>;
        default:
            return flash<Bf16Dot<Bf16Cells>>;
    }
}
double avx512_spin(Dtype dtype, std::int64_t rounds) {
    return dtype == Dtype::bf16 ? spin_dots(rounds) : spin_floats(rounds);
}
LinearKernel avx512_linear() { return Bf16Linear::panel; }
const RowKernels& avx512_rows(Dtype dtype) { return generic_rows(dtype); }
const HeadKernels& avx512_heads(Dtype dtype) { return generic_heads(dtype); }
}  // namespace kvspan
