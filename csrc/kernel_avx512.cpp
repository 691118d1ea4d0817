#include "bf16_dot.h"
#include "bf16_linear.h"
#include "bf16_many.h"
#include "e4m3_group.h"
#include "generic.h"
#include "generic_heads.h"
#include "generic_rows.h"
#include "int8_dot.h"
#include "isa.h"

namespace kvspan {
static void attend_bf16(const Attention& call, const Unit& unit, const Scratch& scratch,
                        const Partial& partial) {
    const auto kernel = Bf16Many::pays(unit) ? Bf16Many::attend : flash<Bf16Dot<Bf16Cells>>;
    kernel(call, unit, scratch, partial);
}

Kernel avx512_kernel(Dtype dtype, Dtype stored) {
    if (dtype != Dtype::bf16) return generic_kernel(dtype, stored);
    switch (stored) {
        case Dtype::i8:
            return flash<Int8Dot>;
        case Dtype::e4m3:
            return flash<E4m3Dot>;
        default:
            return attend_bf16;
    }
}
double avx512_spin(Dtype dtype, std::int64_t rounds) {
    return dtype == Dtype::bf16 ? spin_dots(rounds) : spin_floats(rounds);
}
LinearKernel avx512_linear() { return Bf16Linear::panel; }
const RowKernels& avx512_rows(Dtype dtype) { return generic_rows(dtype); }
const HeadKernels& avx512_heads(Dtype dtype) { return generic_heads(dtype); }
}  // namespace kvspan
