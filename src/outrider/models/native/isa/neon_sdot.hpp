// Spans of several rows by NEON's dot product (neon_dot.hpp).
#pragma once

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

// R rows, an even number
template <int R, int START, bool HALVES> INLINE void add_pairs(const InputSpan* x, const Bytes (&w)[8], const Part (&scales)[2], Part* acc, int apart) {
    constexpr int FOURS = HALVES ? 0 : R / 4 * 4;
    for (int r = 0; r < FOURS; r += 4)
        add_four<START>(x + r, w, scales[0], acc[r * apart], acc[(r + 1) * apart], acc[(r + 2) * apart], acc[(r + 3) * apart]);
    for (int r = FOURS; r < R; r += 2) {
        if constexpr (HALVES) add_two_halves(x + r, w, scales, acc[r * apart], acc[(r + 1) * apart]);
        else add_two<START>(x + r, w, scales[0], acc[r * apart], acc[(r + 1) * apart]);
    }
}
