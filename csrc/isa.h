// Instruction sets: which ones this build has, which one this processor runs.
#pragma once

#include "attention.h"
#include "heads.h"
#include "linear.h"
#include "rows.h"

namespace kvspan {

enum class Isa { portable, avx2, avx512 };

// Whether this build has the kernels of `isa` and this processor can run them.
bool available(Isa isa);

// The attention kernel of an instruction set that is available, for queries of `dtype`.
Kernel attention_kernel(Isa isa, Dtype dtype, Dtype stored);

// The kernel of linear layers in bf16.
LinearKernel linear_kernel(Isa isa);

const RowKernels& row_kernels(Isa isa, Dtype dtype);

const HeadKernels& head_kernels(Isa isa, Dtype dtype);

// Multiplies and adds `rounds` times in registers alone, the way the attention kernel for `dtype` does;
// returns the operations made. Their rate is what the core can do at most.
double spin(Isa isa, Dtype dtype, std::int64_t rounds);

// One table of kernels for each instruction set, in a file compiled for it.
Kernel portable_kernel(Dtype dtype, Dtype stored);
Kernel avx2_kernel(Dtype dtype, Dtype stored);
Kernel avx512_kernel(Dtype dtype, Dtype stored);
double portable_spin(Dtype dtype, std::int64_t rounds);
double avx2_spin(Dtype dtype, std::int64_t rounds);
double avx512_spin(Dtype dtype, std::int64_t rounds);
LinearKernel portable_linear();
LinearKernel avx2_linear();
LinearKernel avx512_linear();
const RowKernels& portable_rows(Dtype dtype);
const HeadKernels& portable_heads(Dtype dtype);
const RowKernels& avx2_rows(Dtype dtype);
const HeadKernels& avx2_heads(Dtype dtype);
const RowKernels& avx512_rows(Dtype dtype);
const HeadKernels& avx512_heads(Dtype dtype);

}  // namespace kvspan
