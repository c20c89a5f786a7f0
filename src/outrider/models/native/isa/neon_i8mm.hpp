// Spans of several rows by NEON's matrix product of 8 bits: two rows of eight inputs times two outputs of eight inputs, four sums.
//
// Whole sums are exact and are scaled as those of the dot product (neon_dot.hpp), so the bits are the same.
#pragma once

// Eight inputs of two outputs in a register: inputs 8 j .. 8 j + 7 of outputs 0 and 1, and of outputs 2 and 3
struct OutputPairs {
    int8x16_t first[4], second[4];
    explicit OutputPairs(const Bytes (&w)[8]) {
        for (int j = 0; j < 4; j++) {
            const int32x4_t low = (int32x4_t)w[2 * j], high = (int32x4_t)w[2 * j + 1];
            first[j] = vreinterpretq_s8_s32(vzip1q_s32(low, high)), second[j] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
        }
    }
};
INLINE int64x2_t lower(int32x4_t a, int32x4_t b) { return vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)); }
INLINE int64x2_t upper(int32x4_t a, int32x4_t b) { return vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)); }

// The sums of two rows over the sixteen inputs from 16 HALF on, added to what they begin with
struct PairSums {
    int32x4_t first, second;  // of outputs 0 and 1: row 0, row 1; of outputs 2 and 3
    PairSums(const int32_t* begin, const int32_t* other) { first = second = vreinterpretq_s32_s64(lower(vld1q_s32(begin), vld1q_s32(other))); }
    template <int HALF> [[gnu::always_inline]] void add(const InputSpan* x, const OutputPairs& w) {
        const int32x4_t a = vreinterpretq_s32_s8(vld1q_s8(x[0].numbers + 16 * HALF)), b = vreinterpretq_s32_s8(vld1q_s8(x[1].numbers + 16 * HALF));
        const int8x16_t early = vreinterpretq_s8_s64(lower(a, b)), late = vreinterpretq_s8_s64(upper(a, b));
        first = vmmlaq_s32(first, early, w.first[2 * HALF]), second = vmmlaq_s32(second, early, w.second[2 * HALF]);
        first = vmmlaq_s32(first, late, w.first[2 * HALF + 1]), second = vmmlaq_s32(second, late, w.second[2 * HALF + 1]);
    }
    Whole row(int r) const { return (Whole)vreinterpretq_s32_s64(r ? upper(first, second) : lower(first, second)); }
};
// R rows, an even number
template <int R, int START, bool HALVES> INLINE void add_pairs(const InputSpan* x, const Bytes (&w)[8], const Part (&scales)[2], Part* acc, int apart) {
    const OutputPairs pairs(w);
    for (int r = 0; r < R; r += 2, x += 2) {
        PairSums sums(x[0].begins[HALVES ? 2 : START], x[1].begins[HALVES ? 2 : START]);
        sums.add<0>(x, pairs);
        if constexpr (HALVES) {
            for (int i = 0; i < 2; i++) add_sum(acc[(r + i) * apart], scales[0], x[i], sums.row(i));
            sums = PairSums(x[0].begins[3], x[1].begins[3]);
        }
        sums.add<1>(x, pairs);
        for (int i = 0; i < 2; i++) add_sum(acc[(r + i) * apart], scales[HALVES], x[i], sums.row(i));
    }
}
