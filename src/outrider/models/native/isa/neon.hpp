// NEON: four registers of four floats, 32 of them.
#pragma once
#include <arm_neon.h>

constexpr int PART_BYTES = 16;
constexpr int QUERIES_AT_ONCE = 4;
constexpr int ACCUMULATORS = 2, MOST_TOGETHER = 4;  // at most 16 of 32 registers for sums: with more, GCC spills
constexpr bool WIDENS_FIRST = true;
#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr const char* ISA_NAME = "neon_bf16";
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr const char* ISA_NAME = "neon_i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr const char* ISA_NAME = "neon_dot";
#else
constexpr const char* ISA_NAME = "neon";
#endif
#include "parts.hpp"

// The next four halves as words; GCC would take __builtin_convertvector apart number by number
INLINE Words words_at(const uint16_t* p) { return (Words)vmovl_u16(vld1_u16(p)); }
INLINE Words upper_words_at(const uint16_t* p) { return (Words)vshll_n_u16(vld1_u16(p), 16); }
// The next four numbers of 8 bits
INLINE Ints whole_numbers(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}
template <class I> INLINE I sixteen_numbers(const int8_t* p) {
    const int8x16_t all = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
    return {(Ints)vmovl_s16(vget_low_s16(low)), (Ints)vmovl_high_s16(low), (Ints)vmovl_s16(vget_low_s16(high)), (Ints)vmovl_high_s16(high)};
}
#include "split.hpp"
#include "neon_panel.hpp"
