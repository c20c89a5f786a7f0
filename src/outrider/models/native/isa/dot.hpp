// Products of whole numbers: four inputs of 8 bits times four weights of a byte, for sixteen outputs at a time.
//
//   Bytes                   64 weights, [16 outputs][4 inputs]
//   upper_bits<BIT, MASK>   the bits from BIT on moved to bit 4 of their bytes, those of MASK; joined: the bits of two
//   add_small, add_bytes    sum[output] += the four products; weights of at most 127, or of at most 255
//   whole, floats           sixteen equal whole numbers; whole numbers as floats
//   round_to_bytes          writes sixteen floats, at most 127, to the nearest (even) whole number; returns their sum
//   load_half               sixteen numbers of 16 bits (IEEE); load_pair: those of an even input and of the next
//   WHOLE_SUMS, WHOLE_ROWS  sums that stay in registers, and rows that share one reading of the weights
//
// Whole numbers are added without rounding, so every instruction set finds the same sums.
#pragma once
#include "isa.hpp"

struct half { uint16_t bits; };  // a number of 16 bits (IEEE)

#if defined(__AVX512BW__) && !defined(OUTRIDER_ISA_GENERIC)
constexpr int WHOLE_SUMS = 8, WHOLE_ROWS = 4;
typedef __m512i Bytes;

INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE Bytes low_halves(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
INLINE Bytes high_halves(Bytes b) { return low_halves(_mm512_srli_epi16(b, 4)); }
INLINE Bytes joined(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
template <int BIT, int MASK> INLINE Bytes upper_bits(Bytes b) {
    const Bytes moved = BIT < 4 ? _mm512_slli_epi16(b, BIT < 4 ? 4 - BIT : 0) : _mm512_srli_epi16(b, BIT < 4 ? 0 : BIT - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(MASK));
}
INLINE I whole(int32_t x) { return (I)_mm512_set1_epi32(x); }
INLINE V floats(I x) { return (V)_mm512_cvtepi32_ps((__m512i)x); }
INLINE V load_half(const uint16_t* p) {
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE void load_pair(const half* from, V& even, V& odd) {
    const __m512i both = _mm512_loadu_si512(from);
    even = (V)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)), odd = (V)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
}
INLINE int32_t round_to_bytes(V x, int8_t* to) {
    const __m512i near = _mm512_cvtps_epi32((__m512)x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(near));
    return _mm512_reduce_add_epi32(near);
}
#if defined(__AVX512VNNI__)
INLINE void add_small(I& sum, Bytes w, int32_t four) { sum = (I)_mm512_dpbusd_epi32((__m512i)sum, w, _mm512_set1_epi32(four)); }
INLINE void add_bytes(I& sum, Bytes w, int32_t four) { add_small(sum, w, four); }
#else
INLINE I small_products(Bytes w, int32_t four) {  // pairs fit into 16 bits
    return (I)_mm512_madd_epi16(_mm512_maddubs_epi16(w, _mm512_set1_epi32(four)), _mm512_set1_epi16(1));
}
INLINE void add_small(I& sum, Bytes w, int32_t four) { sum += small_products(w, four); }
INLINE void add_bytes(I& sum, Bytes w, int32_t four) {
    sum += small_products(low_halves(w), four) + small_products(high_halves(w), four) * 16;
}
#endif
#else
struct Bytes { Words part[PARTS]; };

INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes b;
    memcpy(&b, p, sizeof b);
    return b;
}
INLINE Bytes low_halves(Bytes b) { return each<Bytes>([&](int i) { return b.part[i] & 0x0f0f0f0fu; }); }
INLINE Bytes high_halves(Bytes b) { return each<Bytes>([&](int i) { return b.part[i] >> 4 & 0x0f0f0f0fu; }); }
INLINE Bytes joined(Bytes a, Bytes b) { return each<Bytes>([&](int i) { return a.part[i] | b.part[i]; }); }
template <int BIT, int MASK> INLINE Bytes upper_bits(Bytes b) {
    constexpr uint32_t IN_EACH = MASK * 0x01010101u;
    return each<Bytes>([&](int i) { return (BIT < 4 ? b.part[i] << (BIT < 4 ? 4 - BIT : 0) : b.part[i] >> (BIT < 4 ? 0 : BIT - 4)) & IN_EACH; });
}
INLINE I whole(int32_t x) { return each<I>([&](int) { return Ints{} + x; }); }
INLINE V floats(I x) { return each<V>([&](int i) { return __builtin_convertvector(x.part[i], Floats); }); }

// Adding 1.5 * 2^23 leaves no room for a fraction.
INLINE int32_t round_to_bytes(V x, int8_t* to) {
    const Floats room = Floats{} + 12582912.0f;
    int32_t near[LANES], sum = 0;
    for (int i = 0; i < PARTS; i++) {
        const Ints part = (Ints)(x.part[i] + room) - (Ints)room;
        memcpy(near + i * WIDE, &part, sizeof part);
    }
    for (int i = 0; i < LANES; i++) to[i] = int8_t(near[i]), sum += near[i];
    return sum;
}
#if defined(__AVX2__) && !defined(OUTRIDER_ISA_GENERIC)
constexpr int WHOLE_SUMS = 2, WHOLE_ROWS = 2;
INLINE Ints small_products(Words w, int32_t four) {  // pairs fit into 16 bits
    return (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(four)), _mm256_set1_epi16(1));
}
INLINE void add_small(I& sum, Bytes w, int32_t four) {
    for (int i = 0; i < PARTS; i++) sum.part[i] += small_products(w.part[i], four);
}
INLINE void add_bytes(I& sum, Bytes w, int32_t four) {
    const Bytes low = low_halves(w), high = high_halves(w);
    for (int i = 0; i < PARTS; i++) sum.part[i] += small_products(low.part[i], four) + small_products(high.part[i], four) * 16;
}
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(OUTRIDER_ISA_GENERIC)
constexpr int WHOLE_SUMS = 2, WHOLE_ROWS = 2;
INLINE Ints with_small(Ints sum, Words w, int32_t four) {
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
INLINE void add_small(I& sum, Bytes w, int32_t four) {
    for (int i = 0; i < PARTS; i++) sum.part[i] = with_small(sum.part[i], w.part[i], four);
}
INLINE void add_bytes(I& sum, Bytes w, int32_t four) {
    const Bytes low = low_halves(w), high = high_halves(w);
    for (int i = 0; i < PARTS; i++) sum.part[i] = with_small(sum.part[i], low.part[i], four) + with_small(Ints{}, high.part[i], four) * 16;
}
#else
constexpr int WHOLE_SUMS = 1, WHOLE_ROWS = 1;
INLINE void add_bytes(I& sum, Bytes w, int32_t four) {
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < PARTS; i++) sum.part[i] += (Ints)(w.part[i] >> 8 * j & 255u) * int32_t(int8_t(uint32_t(four) >> 8 * j));
}
INLINE void add_small(I& sum, Bytes w, int32_t four) { add_bytes(sum, w, four); }
#endif
// The exponent is moved to where a float has it; the multiplication also makes numbers below the smallest normal one right.
INLINE V load_half(const uint16_t* p) {
    return each<V>([&](int i) {
        Halves h;
        memcpy(&h, p + i * WIDE, sizeof h);
        const Words w = __builtin_convertvector(h, Words), endless = (Words)((Ints)(w & 0x7c00u) == 0x7c00);
        const Words size = (Words)((Floats)((w & 0x7fffu) << 13) * 0x1p112f);
        return (Floats)(size | (endless & 0x7f800000u) | (w & 0x8000u) << 16);
    });
}
INLINE void load_pair(const half* from, V& even, V& odd) {
    uint16_t first[LANES], second[LANES];
    for (int i = 0; i < LANES; i++) first[i] = from[2 * i].bits, second[i] = from[2 * i + 1].bits;
    even = load_half(first), odd = load_half(second);
}
#endif
