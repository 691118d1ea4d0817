#include "isa.h"

namespace kvspan {

bool available(Isa isa) {
    switch (isa) {
        case Isa::portable:
            return true;
#ifdef KVSPAN_X86
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c");
        case Isa::avx512:
            return available(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") &&
                   __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#endif
        default:
            return false;
    }
}

Kernel attention_kernel(Isa isa, Dtype dtype, Dtype stored) {
    switch (isa) {
#ifdef KVSPAN_X86
        case Isa::avx2:
            return avx2_kernel(dtype, stored);
        case Isa::avx512:
            return avx512_kernel(dtype, stored);
#endif
        default:
            return portable_kernel(dtype, stored);
    }
}

double spin(Isa isa, Dtype dtype, std::int64_t rounds) {
    switch (isa) {
#ifdef KVSPAN_X86
        case Isa::avx2:
            return avx2_spin(dtype, rounds);
        case Isa::avx512:
            return avx512_spin(dtype, rounds);
#endif
        default:
            return portable_spin(dtype, rounds);
    }
}

LinearKernel linear_kernel(Isa isa) {
    switch (isa) {
#ifdef KVSPAN_X86
        case Isa::avx2:
            return avx2_linear();
        case Isa::avx512:
            return avx512_linear();
#endif
        default:
            return portable_linear();
    }
}

const RowKernels& row_kernels(Isa isa, Dtype dtype) {
    switch (isa) {
#ifdef KVSPAN_X86
        case Isa::avx2:
            return avx2_rows(dtype);
        case Isa::avx512:
            return avx512_rows(dtype);
#endif
        default:
            return portable_rows(dtype);
    }
}

const HeadKernels& head_kernels(Isa isa, Dtype dtype) {
    switch (isa) {
#ifdef KVSPAN_X86
        case Isa::avx2:
            return avx2_heads(dtype);
        case Isa::avx512:
            return avx512_heads(dtype);
#endif
        default:
            return portable_heads(dtype);
    }
}

}  // namespace kvspan
