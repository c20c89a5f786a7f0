// Products with IEEE's floats of 16 bits that are added in 16 bits, 32 inputs at a time, on cores that add such numbers.
//
// Inputs are rounded to 16 bits, each 32 divided by a power of two first, so that the largest is at least 2 and below 4. The products of
// even inputs are one chain of multiply-adds in 16 bits, those of odd inputs another. Their sum, times the power of two, is added to a
// float. So no sum has more than 16 roundings to 16 bits, and a row's bits do not depend on who shares the pass. Sums cannot
// overflow if no weight is 512 or more: other matrices are multiplied in floats (matmul.hpp).
#pragma once
#include "isa/half.hpp"
#include "span_rows.hpp"

typedef SpanRows<HalfSpan, HALF_ROWS> HalfRows;

static inline float power_of_two(int exponent) {
    const uint32_t bits = uint32_t(exponent + 127) << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline void round_span(const float* x, HalfSpan& to) {
    const float most = largest_of_span(x);
    uint32_t bits;
    memcpy(&bits, &most, 4);
    const int exponent = std::clamp(int(bits >> 23) - 128, -100, 100);
    to.put(load(x) * power_of_two(-exponent), load(x + LANES) * power_of_two(-exponent), power_of_two(exponent));
}

static inline void round_spans(const float* x, int count, HalfSpan* to, int apart) {
    for (int k = 0; k < count; k++) round_span(x + k * SPAN, to[size_t(k) * apart]);
}

struct HalfSums;  // the weights of such a product
template <> struct Blocks<HalfSums> : Blocks<half> {
    static Blocks of(const Matrix& w, int first) { return {Blocks<half>::of(w, first)}; }
};
// Whether the products with packed weights can be added so
static inline bool adds_halves(const half* packed, size_t count) {
    constexpr uint16_t TOO_LARGE = 0x6000;  // 512
    uint16_t most = 0;
    for (size_t i = 0; i < count; i++) most = std::max(most, uint16_t(packed[i].bits & 0x7fff));
    return ADDS_HALVES && most < TOO_LARGE;
}
template <int R> static void multiply_half_rows(int rows, Spans<HalfSpan, HALF_ROWS> x, const half* w, float* sums, int wide) {
    if constexpr (R > 1)
        if (rows <= R / 2) return multiply_half_rows<R / 2>(rows, x, w, sums, wide);
    multiply_halves<R>(x.spans, w, size_t(x.num_spans), sums, size_t(wide));  // of rows that are not there, too
}
// Up to 64 rows times `count` blocks
template <class C>
static void multiply_group(int rows, Spans<HalfSpan, HALF_ROWS> x, Blocks<HalfSums> w, int count, Blocks<HalfSums>, float* sums, C&) {
    constexpr int WIDE = GROUP * BLOCK;
    for (int b = 0; b < count; b++)
        for (int row = 0; row < rows; row += HALF_ROWS)
            multiply_half_rows<HALF_ROWS>(std::min(rows - row, HALF_ROWS), {x.from(row).spans, w.width / SPAN}, w.after(b).at,
                                          sums + size_t(row) * WIDE + b * BLOCK, WIDE);
}
