// NEON's dot product: four inputs of 8 bits times four weights, added to each of four outputs.
//
// The sums of a span are below 2^22, so they are added to the bits of 1.5 * 2^23: as a float that is 1.5 * 2^23 plus the sum. One
// multiply-add takes the 1.5 * 2^23 away and multiplies by the inputs' scale, exactly but for one rounding, since scales have 22 bits
// (stored.hpp). A conversion would take four times as long on a Neoverse-N1. What is equal in all lanes lies so in memory, since loads
// are free beside products, and copies between registers are not.
#pragma once

constexpr bool SIGNED_NUMBERS = true;
constexpr int WHOLE_ROWS = 8;
constexpr int strips_for(int sums) { return sums > 1 ? 1 : 4; }

constexpr float NO_SUM = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t NO_SUM_BITS = 0x4b400000;

struct alignas(64) InputSpan {
    int8_t numbers[32];
    float minus[4];    // -NO_SUM * scale
    float scale, sum;  // sum: of the 32 rounded inputs
    alignas(16) int32_t begins[4][4];  // what sums begin with: of weights, of weights less 16, and of either half of weights less 32
    void put(float by, int32_t first, int32_t second) {
        scale = by, sum = by * float(first + second);
        const int32_t less[4] = {0, 16 * (first + second), 32 * first, 32 * second};
        for (int i = 0; i < 4; i++) {
            minus[i] = -NO_SUM * by;
            for (int32_t& one : begins[i]) one = NO_SUM_BITS - less[i];
        }
    }
};
INLINE Bytes signed_low_halves(Bytes b) { return (Bytes)vshlq_n_u8((uint8x16_t)b, 4); }
INLINE Bytes signed_high_halves(Bytes b) { return b & 0xf0f0f0f0u; }

// One row
INLINE Whole sum_of(const int32_t* begin, const Bytes* w, const int8_t* x) {
    const int8x16_t inputs = vld1q_s8(x);
    int32x4_t sum = vld1q_s32(begin);
    sum = vdotq_laneq_s32(sum, (int8x16_t)w[0], inputs, 0), sum = vdotq_laneq_s32(sum, (int8x16_t)w[1], inputs, 1);
    sum = vdotq_laneq_s32(sum, (int8x16_t)w[2], inputs, 2), sum = vdotq_laneq_s32(sum, (int8x16_t)w[3], inputs, 3);
    return (Whole)sum;
}
INLINE void add_sum(Part& to, Part scale, const InputSpan& x, Whole sum) {
    const float32x4_t found = vfmaq_n_f32(vld1q_f32(x.minus), (float32x4_t)sum, x.scale);
    to = (Part)vfmaq_f32((float32x4_t)to, (float32x4_t)scale, found);
}
template <int START> INLINE void add_one(const InputSpan& x, const Bytes (&w)[8], Part scale, Part& to) {
    int32x4_t sum = (int32x4_t)sum_of(x.begins[START], w, x.numbers);
    const int8x16_t inputs = vld1q_s8(x.numbers + 16);
    sum = vdotq_laneq_s32(sum, (int8x16_t)w[4], inputs, 0), sum = vdotq_laneq_s32(sum, (int8x16_t)w[5], inputs, 1);
    sum = vdotq_laneq_s32(sum, (int8x16_t)w[6], inputs, 2), sum = vdotq_laneq_s32(sum, (int8x16_t)w[7], inputs, 3);
    add_sum(to, scale, x, (Whole)sum);
}
INLINE void add_one_of_halves(const InputSpan& x, const Bytes (&w)[8], const Part (&scales)[2], Part& to) {
    add_sum(to, scales[0], x, sum_of(x.begins[2], w, x.numbers)), add_sum(to, scales[1], x, sum_of(x.begins[3], w + 4, x.numbers + 16));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "neon_i8mm.hpp"
#else
#include "neon_sdot.hpp"
#endif

// A span of R rows times that of the outputs of a strip
template <int R, class W> INLINE void add_strip(const InputSpan* x, const W& w, int strip, int span, Part* acc, int apart) {
    constexpr int START = W::READ_BITS == 5 && W::ZERO == 16, HALVES = W::GROUPS == 2;
    Bytes numbers[8];
    w.template two<0>(strip, span, numbers[0], numbers[4]), w.template two<1>(strip, span, numbers[1], numbers[5]);
    w.template two<2>(strip, span, numbers[2], numbers[6]), w.template two<3>(strip, span, numbers[3], numbers[7]);
    Part scales[2] = {};
    for (int g = 0; g < W::GROUPS; g++) scales[g] = W::TIMES == 1 ? w.scale(strip, span, g) : w.scale(strip, span, g) * (1.0f / W::TIMES);
    if constexpr (R > 1) add_pairs<R / 2 * 2, START, HALVES>(x, numbers, scales, acc, apart);
    if constexpr (R % 2) {
        if constexpr (HALVES) add_one_of_halves(x[R - 1], numbers, scales, acc[(R - 1) * apart]);
        else add_one<START>(x[R - 1], numbers, scales[0], acc[(R - 1) * apart]);
    }
    if constexpr (W::HAS_OFFSETS) {
        const Part offset = w.offset(strip, span);
        for (int r = 0; r < R; r++) acc[r * apart] = (Part)vfmaq_n_f32((float32x4_t)acc[r * apart], (float32x4_t)offset, x[r].sum);
    }
}
