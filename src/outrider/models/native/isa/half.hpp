// Sums of products in IEEE's 16 bits, where the instruction set has them.
//
//   ADDS_HALVES         whether it has
//   HalfSpan, HALF_ROWS 32 inputs in 16 bits and their scale; rows that are multiplied together
//   multiply_halves<R>  R rows times a block
#pragma once
#include "dot.hpp"

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC) && !defined(OUTRIDER_ISA_GENERIC)
#include "neon_half.hpp"
#else
constexpr bool ADDS_HALVES = false;
constexpr int HALF_ROWS = 1;
struct HalfSpan {
    void put(V, V, float) {}
};
template <int R> static void multiply_halves(const HalfSpan*, const half*, size_t, float*, size_t) {}
#endif
