// Sixteen floats in vectors of the machine's own width, PART_BYTES each: what AVX2, NEON and the generic code share.
//
// One vector type of 64 bytes would be simpler, but a compiler keeps what is wider than a register in memory.
#pragma once
#include "parts.hpp"

constexpr bool HAS_TILES = false;
constexpr int MANY_ROWS = 0, MANY_BLOCKS = 1;
constexpr int WIDE = PART_BYTES / 4, PARTS = LANES / WIDE;

struct V { Floats part[PARTS]; };
struct I { Ints part[PARTS]; };

template <class R, class F> INLINE R each(F make) {
    R made;
    for (int i = 0; i < PARTS; i++) made.part[i] = make(i);
    return made;
}
INLINE V operator+(V a, V b) { return each<V>([&](int i) { return a.part[i] + b.part[i]; }); }
INLINE V operator-(V a, V b) { return each<V>([&](int i) { return a.part[i] - b.part[i]; }); }
INLINE V operator*(V a, V b) { return each<V>([&](int i) { return a.part[i] * b.part[i]; }); }
INLINE V operator/(V a, V b) { return each<V>([&](int i) { return a.part[i] / b.part[i]; }); }
INLINE V operator+(V a, float b) { return each<V>([&](int i) { return a.part[i] + b; }); }
INLINE V operator-(V a, float b) { return each<V>([&](int i) { return a.part[i] - b; }); }
INLINE V operator*(V a, float b) { return each<V>([&](int i) { return a.part[i] * b; }); }
INLINE V operator/(V a, float b) { return each<V>([&](int i) { return a.part[i] / b; }); }
INLINE V operator+(float a, V b) { return b + a; }
INLINE V operator*(float a, V b) { return b * a; }
INLINE V operator-(float a, V b) { return each<V>([&](int i) { return a - b.part[i]; }); }
INLINE V operator/(float a, V b) { return each<V>([&](int i) { return a / b.part[i]; }); }
INLINE V operator-(V a) { return each<V>([&](int i) { return -a.part[i]; }); }
INLINE V& operator+=(V& a, V b) { return a = a + b; }
INLINE I operator<(V a, V b) { return each<I>([&](int i) { return (Ints)(a.part[i] < b.part[i]); }); }
INLINE I operator>(V a, V b) { return b < a; }

INLINE Floats floats_at(const float* p) {
    Floats some;
    memcpy(&some, p, sizeof some);
    return some;
}
INLINE Floats floats_at(const bf16* p) { return (Floats)upper_words_at(p); }
INLINE V load(const float* p) { return each<V>([&](int i) { return floats_at(p + i * WIDE); }); }
INLINE void store(float* p, V v) {
    for (int i = 0; i < PARTS; i++) memcpy(p + i * WIDE, &v.part[i], sizeof v.part[i]);
}
INLINE V splat(float x) { return each<V>([&](int) { return Floats{} + x; }); }
INLINE V select(I mask, V yes, V no) { return each<V>([&](int i) { return mask.part[i] ? yes.part[i] : no.part[i]; }); }
INLINE V max(V a, V b) { return each<V>([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; }); }

INLINE float largest(V v) {
    Floats most = v.part[0];
    for (int i = 1; i < PARTS; i++) most = most > v.part[i] ? most : v.part[i];
    float x[WIDE];
    memcpy(x, &most, sizeof most);
    for (int width = WIDE / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

INLINE V load(const bf16* p) { return each<V>([&](int i) { return floats_at(p + i * WIDE); }); }
INLINE V floats(I x) { return each<V>([&](int i) { return __builtin_convertvector(x.part[i], Floats); }); }
INLINE V load(const int8_t* p) { return floats(sixteen_numbers<I>(p)); }
// [16][2]: the numbers of an even input are the lower halves of 16 words, those of the next the upper ones
INLINE void load_pair(const bf16* from, V& even, V& odd) {
    for (int i = 0; i < PARTS; i++) {
        Words pair;
        memcpy(&pair, from + 2 * i * WIDE, sizeof pair);
        even.part[i] = (Floats)(pair << 16), odd.part[i] = (Floats)(pair & 0xffff0000u);
    }
}
INLINE void load_pair(const int8_t* from, V& even, V& odd) { even = load(from), odd = load(from + LANES); }

// To nearest even, as the upper half of each word; a NaN stays one.
INLINE Words rounded_word(Floats x) {
    const Words u = (Words)x, nearest = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    const Words is_nan = (Words)((Ints)(u & 0x7fffffffu) > 0x7f800000);
    return (nearest & ~is_nan) | (((u & 0xffff0000u) | 0x400000u) & is_nan);
}
INLINE V rounded(V v) { return each<V>([&](int i) { return (Floats)rounded_word(v.part[i]); }); }
INLINE void store(bf16* p, V v) {
    for (int i = 0; i < PARTS; i++) {
        const Halves h = __builtin_convertvector(rounded_word(v.part[i]) >> 16, Halves);
        memcpy(p + i * WIDE, &h, sizeof h);
    }
}

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial in r, n put into the exponent. 0 below -87.
INLINE V exp(V x) {
    const V low = splat(-87.0f), high = splat(88.0f), round = splat(12582912.0f);
    const I tiny = x < low;
    x = select(x > high, high, select(tiny, low, x));
    V n = x * LOG2_E + round;
    const V scale = each<V>([&](int i) { return (Floats)(((Ints)((Words)n.part[i] - (Words)round.part[i]) + 127) << 23); });
    n = n - round;
    const V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return select(tiny, splat(0.0f), y * scale);
}
template <class T> INLINE V exp_of_minus(V x) { return exp(-x); }
INLINE V inverse(V x) { return 1.0f / x; }

template <int A, int B, int C, int D> INLINE Quad shuffled(Quad a, Quad b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, A, B, C, D);
#else
    return __builtin_shuffle(a, b, QuadInts{A, B, C, D});
#endif
}
INLINE Quad folded(Floats v) {
    Quad q[WIDE / 4];
    memcpy(q, &v, sizeof v);
    if constexpr (WIDE == 8) q[0] = q[0] + q[1];
    return q[0];
}
// The sums of four vectors: lanes 0 and 2, 1 and 3, then both
INLINE Quad sums(const Floats* v) {
    const Quad a = folded(v[0]), b = folded(v[1]), c = folded(v[2]), d = folded(v[3]);
    const Quad ab = shuffled<0, 4, 1, 5>(a, b) + shuffled<2, 6, 3, 7>(a, b);  // a0 + a2, b0 + b2, a1 + a3, b1 + b3
    const Quad cd = shuffled<0, 4, 1, 5>(c, d) + shuffled<2, 6, 3, 7>(c, d);
    return shuffled<0, 1, 4, 5>(ab, cd) + shuffled<2, 3, 6, 7>(ab, cd);
}
constexpr int LEAST_ACROSS = 0, MOST_ACROSS = 0;
// Q queries times sixteen keys, a few keys at a time: their sums stay in registers.
template <int Q, class T> INLINE void dots(const float* const* queries, const T* const* keys, int dim, V* found) {
    constexpr int AT_ONCE = Q == 1 ? 8 : 4;
    Quad all[Q][LANES / 4];
    for (int first = 0; first < LANES; first += AT_ONCE) {
        Floats acc[Q][AT_ONCE] = {};
        for (int d = 0; d < dim; d += WIDE) {
            Floats some[Q];
            for (int q = 0; q < Q; q++) some[q] = floats_at(queries[q] + d);
            for (int j = 0; j < AT_ONCE; j++) {
                const Floats key = floats_at(keys[first + j] + d);
                for (int q = 0; q < Q; q++) acc[q][j] += some[q] * key;
            }
        }
        for (int q = 0; q < Q; q++)
            for (int j = 0; j < AT_ONCE; j += 4) all[q][(first + j) / 4] = sums(acc[q] + j);
    }
    for (int q = 0; q < Q; q++) memcpy(&found[q], all[q], sizeof found[q]);
}
