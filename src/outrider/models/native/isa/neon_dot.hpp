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

// Rows in pairs, their products in turns, and what is done with the sums of a pair after the products of the next. The compiler would do
// otherwise, which takes a quarter longer.
static_assert(sizeof(InputSpan) == 128 && offsetof(InputSpan, minus) == 32 && offsetof(InputSpan, scale) == 48 && offsetof(InputSpan, begins) == 64);
#define DOT(SUM, W, X, LANE) "sdot v" #SUM ".4s, %[" #W "].16b, v" #X ".4b[" #LANE "]\n"
#define DOTS(A, B, W0, W1, W2, W3, X, Y) \
    DOT(A, W0, X, 0) DOT(B, W0, Y, 0) DOT(A, W1, X, 1) DOT(B, W1, Y, 1) DOT(A, W2, X, 2) DOT(B, W2, Y, 2) DOT(A, W3, X, 3) DOT(B, W3, Y, 3)
#define BEGIN(A, B, AT, NEXT, START) "ldr q" #A ", [%[x], " #AT " + %[" #START "]]\n ldr q" #B ", [%[x], " #NEXT " + %[" #START "]]\n"
#define INPUTS(X, Y, AT, NEXT, HALF) "ldr q" #X ", [%[x], " #AT " + " #HALF "]\n ldr q" #Y ", [%[x], " #NEXT " + " #HALF "]\n"
#define SCALED(SUM, AT, T, S) "ldr q" #T ", [%[x], " #AT " + 32]\n ldr s" #S ", [%[x], " #AT " + 48]\n fmla v" #T ".4s, v" #SUM ".4s, v" #S ".s[0]\n"
#define ADD(ACC, SCALE, T) "fmla %[" #ACC "].4s, %[" #SCALE "].4s, v" #T ".4s\n"
#define PAIR_DOTS(A, B, A2, B2, AT, NEXT, X, Y) \
    INPUTS(X, Y, AT, NEXT, 0) DOTS(A, B, w0, w1, w2, w3, X, Y) INPUTS(X, Y, AT, NEXT, 16) DOTS(A2, B2, w4, w5, w6, w7, X, Y)
#define PAIR_ADDS(A, B, AT, NEXT, ACC, BCC, SCALE) SCALED(A, AT, 4, 5) SCALED(B, NEXT, 6, 7) ADD(ACC, SCALE, 4) ADD(BCC, SCALE, 6)
#define WEIGHTS [w0] "w"(w[0]), [w1] "w"(w[1]), [w2] "w"(w[2]), [w3] "w"(w[3]), [w4] "w"(w[4]), [w5] "w"(w[5]), [w6] "w"(w[6]), [w7] "w"(w[7])
#define TEMPORARIES "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7"

// acc[row] += scale * (the span of that row times eight vectors of weights); two scales: of either half
template <int START> INLINE void add_four(const InputSpan* x, const Bytes (&w)[8], Part scale, Part& a, Part& b, Part& c, Part& d) {
    __asm__(BEGIN(0, 1, 0, 128, begin) PAIR_DOTS(0, 1, 0, 1, 0, 128, 4, 5)
            BEGIN(2, 3, 256, 384, begin) PAIR_DOTS(2, 3, 2, 3, 256, 384, 4, 5)
            PAIR_ADDS(0, 1, 0, 128, a, b, scale) PAIR_ADDS(2, 3, 256, 384, c, d, scale)
            : [a] "+w"(a), [b] "+w"(b), [c] "+w"(c), [d] "+w"(d)
            : WEIGHTS, [scale] "w"(scale), [x] "r"(x), [begin] "i"(64 + 16 * START), "m"(*(const InputSpan(*)[4])x)
            : TEMPORARIES);
}
template <int START> INLINE void add_two(const InputSpan* x, const Bytes (&w)[8], Part scale, Part& a, Part& b) {
    __asm__(BEGIN(0, 1, 0, 128, begin) PAIR_DOTS(0, 1, 0, 1, 0, 128, 4, 5) PAIR_ADDS(0, 1, 0, 128, a, b, scale)
            : [a] "+w"(a), [b] "+w"(b)
            : WEIGHTS, [scale] "w"(scale), [x] "r"(x), [begin] "i"(64 + 16 * START), "m"(*(const InputSpan(*)[2])x)
            : TEMPORARIES);
}
INLINE void add_two_halves(const InputSpan* x, const Bytes (&w)[8], const Part (&scales)[2], Part& a, Part& b) {
    __asm__(BEGIN(0, 1, 0, 128, first) BEGIN(2, 3, 0, 128, second) PAIR_DOTS(0, 1, 2, 3, 0, 128, 4, 5)
            PAIR_ADDS(0, 1, 0, 128, a, b, scale) PAIR_ADDS(2, 3, 0, 128, a, b, other)
            : [a] "+w"(a), [b] "+w"(b)
            : WEIGHTS, [scale] "w"(scales[0]), [other] "w"(scales[1]), [x] "r"(x), [first] "i"(64 + 32), [second] "i"(64 + 48),
              "m"(*(const InputSpan(*)[2])x)
            : TEMPORARIES);
}
#undef DOT
#undef DOTS
#undef BEGIN
#undef INPUTS
#undef SCALED
#undef ADD
#undef PAIR_DOTS
#undef PAIR_ADDS
#undef WEIGHTS
#undef TEMPORARIES

// The same of one row
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

// A span of R rows times that of the outputs of a strip
template <int R, class W> INLINE void add_strip(const InputSpan* x, const W& w, int strip, int span, Part* acc, int apart) {
    constexpr int START = W::BITS == 5 && W::ZERO == 16, HALVES = W::GROUPS == 2;
    Bytes numbers[8];
    w.template two<0>(strip, span, numbers[0], numbers[4]), w.template two<1>(strip, span, numbers[1], numbers[5]);
    w.template two<2>(strip, span, numbers[2], numbers[6]), w.template two<3>(strip, span, numbers[3], numbers[7]);
    Part scales[W::GROUPS];
    for (int g = 0; g < W::GROUPS; g++) scales[g] = W::TIMES == 1 ? w.scale(strip, span, g) : w.scale(strip, span, g) * (1.0f / W::TIMES);
    constexpr int FOURS = HALVES ? 0 : R / 4 * 4, TWOS = R / 2 * 2;
    if constexpr (FOURS > 0) add_four<START>(x, numbers, scales[0], acc[0], acc[apart], acc[2 * apart], acc[3 * apart]);
    if constexpr (FOURS > 4) add_four<START>(x + 4, numbers, scales[0], acc[4 * apart], acc[5 * apart], acc[6 * apart], acc[7 * apart]);
    for (int r = FOURS; r < TWOS; r += 2) {
        if constexpr (HALVES) add_two_halves(x + r, numbers, scales, acc[r * apart], acc[(r + 1) * apart]);
        else add_two<START>(x + r, numbers, scales[0], acc[r * apart], acc[(r + 1) * apart]);
    }
    if constexpr (R % 2) {
        if constexpr (HALVES) add_one_of_halves(x[R - 1], numbers, scales, acc[(R - 1) * apart]);
        else add_one<START>(x[R - 1], numbers, scales[0], acc[(R - 1) * apart]);
    }
    if constexpr (W::HAS_OFFSETS) {
        const Part offset = w.offset(strip, span);
        for (int r = 0; r < R; r++) acc[r * apart] = (Part)vfmaq_n_f32((float32x4_t)acc[r * apart], (float32x4_t)offset, x[r].sum);
    }
}
