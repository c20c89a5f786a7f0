// Products of whole numbers: four inputs of 8 bits times four weights of a byte, for as many outputs as a register holds.
//
//   STRIPS, STRIP           registers that hold sixteen outputs, and the outputs of each
//   Bytes, Whole, Part      of STRIP outputs: the weights of four inputs, whole sums, floats
//   low_halves, high_halves of bytes; below upper bits, where some are given
//   looked_up               what codes of four bits stand for, a byte each
//   upper_bits<BIT, MASK>   the bits from BIT on moved to bit 4 of their bytes, those of MASK
//   products, plus          in place of the next two, on sets that add pairs of products in 16 bits first (short_sums.hpp)
//   add_small<v>            sum[output] += the products with inputs 4 v .. 4 v + 3 of a span; weights of at most 127
//   add_bytes<v>            the same with weights of at most 255 that stand for 128 less
//   BYTES_BEGIN_LESS        whether sums with such weights begin with -128 times the sum of the inputs
//   whole                   equal whole numbers
//   without_bias            a whole sum that was added to the bits of 1.5 * 2^23, as a float, times the inputs' scale (spans.hpp)
//   part, upper_part        STRIP numbers of 16 bits (IEEE), of 8 bits, or floats; of the upper halves of floats
//   round_to_bytes          writes sixteen floats, at most 127, to the nearest (even) whole number; returns their sum
//   load_half               sixteen numbers of 16 bits (IEEE); load_pair: those of an even input and of the next, but for LIFT
//   InputSpan               32 inputs that were rounded: their scale and what sums of products with them begin with
//   add_strip<R>            a span of R rows times that of the outputs of a strip, scaled, added to floats; add_strips: of several strips
//   SPREADS                 for many rows weights are written out as bytes: SpreadSpan, add_spread (vnni.hpp)
//   SIGNED_NUMBERS          numbers of 8 bits, and those of 4 that stand for 8 less, are packed with a sign; signed_..._halves read the latter
//   WHOLE_ROWS, strips_for  rows that share one reading of the weights, and how many strips so many rows (times groups) take at a time
//
// Whole numbers are added without rounding, so every instruction set finds the same sums.
#pragma once
#include "isa.hpp"

INLINE int32_t four_at(const int8_t* inputs, int v) {
    int32_t word;
    memcpy(&word, inputs + v * 4, 4);
    return word;
}

#if defined(__AVX512BW__) && !defined(OUTRIDER_ISA_GENERIC)
constexpr int STRIPS = 1;
#if defined(__AVX512VNNI__)
constexpr int WHOLE_ROWS = 4;  // six would be 8 % faster, but do not divide MOST_ROWS
constexpr int strips_for(int sums) { return sums > 8 ? 1 : sums > 2 ? 2 : 4; }
#else
constexpr int WHOLE_ROWS = 8;
constexpr int strips_for(int sums) { return sums > 4 ? 1 : 8 / sums; }
#endif
typedef __m512i Bytes;
typedef I Whole;
typedef V Part;

INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE Bytes low_halves(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
INLINE Bytes high_halves(Bytes b) { return low_halves(_mm512_srli_epi16(b, 4)); }
INLINE Bytes low_halves(Bytes b, Bytes upper) { return _mm512_or_si512(low_halves(b), upper); }
INLINE Bytes high_halves(Bytes b, Bytes upper) { return _mm512_or_si512(high_halves(b), upper); }
template <int BIT, int MASK> INLINE Bytes upper_bits(Bytes b) {
    const Bytes moved = BIT < 4 ? _mm512_slli_epi16(b, BIT < 4 ? 4 - BIT : 0) : _mm512_srli_epi16(b, BIT < 4 ? 0 : BIT - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(MASK));
}
INLINE Bytes looked_up(const void* table, Bytes codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(static_cast<const __m128i*>(table))), codes);
}
INLINE I whole(int32_t x) { return (I)_mm512_set1_epi32(x); }
INLINE Part without_bias(Whole sum, float scale, float minus) { return (Part)_mm512_fmadd_ps((__m512)sum, _mm512_set1_ps(scale), _mm512_set1_ps(minus)); }
INLINE V load_half(const uint16_t* p) {
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE Part part(const uint16_t* halves) { return load_half(halves); }
INLINE Part upper_part(const uint16_t* from) { return load(static_cast<const bf16*>(from)); }
INLINE Part part(const int8_t* from) { return load(from); }
INLINE Part part(const float* from) { return load(from); }
INLINE int32_t round_to_bytes(V x, int8_t* to) {
    const __m512i near = _mm512_cvtps_epi32((__m512)x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(near));
    return _mm512_reduce_add_epi32(near);
}
#if defined(__AVX512VNNI__)
constexpr bool BYTES_BEGIN_LESS = true;
#else
#define OUTRIDER_SHORT_SUMS
constexpr bool BYTES_BEGIN_LESS = false;
typedef __m512i Shorts;
struct Signed {
    Bytes sizes;
    __mmask64 is_below;
};
INLINE Shorts products(Bytes w, int32_t four) { return _mm512_maddubs_epi16(w, _mm512_set1_epi32(four)); }
INLINE Shorts plus(Shorts a, Shorts b) { return _mm512_add_epi16(a, b); }
INLINE Whole whole(Shorts pairs) { return (I)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
INLINE Signed less_128(Bytes w) {
    const Bytes found = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
    return {_mm512_abs_epi8(found), _mm512_movepi8_mask(found)};
}
INLINE Shorts products(const Signed& w, int32_t four) {
    const Bytes inputs = _mm512_set1_epi32(four);
    return _mm512_maddubs_epi16(w.sizes, _mm512_mask_sub_epi8(inputs, w.is_below, _mm512_setzero_si512(), inputs));
}
#endif
#else
typedef Words Bytes;
typedef Ints Whole;
typedef Floats Part;
constexpr int STRIPS = PARTS;

INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes b;
    memcpy(&b, p, sizeof b);
    return b;
}
INLINE Bytes low_halves(Bytes b) { return b & 0x0f0f0f0fu; }
template <int BIT, int MASK> INLINE Bytes upper_bits(Bytes b) {
    return (BIT < 4 ? b << (BIT < 4 ? 4 - BIT : 0) : b >> (BIT < 4 ? 0 : BIT - 4)) & MASK * 0x01010101u;
}
INLINE Whole whole(int32_t x) { return Whole{} + x; }
INLINE Part floats(Whole x) { return __builtin_convertvector(x, Floats); }
INLINE Part upper_part(const uint16_t* from) { return floats_at(static_cast<const bf16*>(from)); }
INLINE Part part(const int8_t* from) { return floats(whole_numbers(from)); }
INLINE Part part(const float* from) { return floats_at(from); }

#if defined(__ARM_NEON) && !defined(OUTRIDER_ISA_GENERIC)
INLINE Bytes high_halves(Bytes b) { return (Bytes)vshrq_n_u8((uint8x16_t)b, 4); }
INLINE Bytes looked_up(const void* table, Bytes codes) { return (Bytes)vqtbl1q_u8(vld1q_u8(static_cast<const uint8_t*>(table)), (uint8x16_t)codes); }
INLINE Bytes low_halves(Bytes b, Bytes upper) { return (Bytes)vbslq_u8(vdupq_n_u8(15), (uint8x16_t)b, (uint8x16_t)upper); }
INLINE Bytes high_halves(Bytes b, Bytes upper) { return (Bytes)vsriq_n_u8((uint8x16_t)upper, (uint8x16_t)b, 4); }
INLINE Part part(const uint16_t* halves) { return (Part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves))); }
INLINE int32_t round_to_bytes(V x, int8_t* to) {
    int32x4_t near[PARTS];
    for (int i = 0; i < PARTS; i++) near[i] = vcvtnq_s32_f32((float32x4_t)x.part[i]);
    const int16x8_t low = vcombine_s16(vmovn_s32(near[0]), vmovn_s32(near[1])), high = vcombine_s16(vmovn_s32(near[2]), vmovn_s32(near[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    return vaddvq_s32(vaddq_s32(vaddq_s32(near[0], near[1]), vaddq_s32(near[2], near[3])));
}
#else
INLINE Bytes high_halves(Bytes b) { return b >> 4 & 0x0f0f0f0fu; }
INLINE Bytes low_halves(Bytes b, Bytes upper) { return low_halves(b) | upper; }
INLINE Bytes high_halves(Bytes b, Bytes upper) { return high_halves(b) | upper; }
#if defined(__AVX2__) && !defined(OUTRIDER_ISA_GENERIC)
INLINE Bytes looked_up(const void* table, Bytes codes) {
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(static_cast<const __m128i*>(table))), (__m256i)codes);
}
#else
INLINE Bytes looked_up(const void* table, Bytes codes) {
    uint8_t each[sizeof(Bytes)];
    memcpy(each, &codes, sizeof codes);
    for (uint8_t& one : each) one = static_cast<const uint8_t*>(table)[one];
    memcpy(&codes, each, sizeof codes);
    return codes;
}
#endif
#if defined(__F16C__) && !defined(OUTRIDER_ISA_GENERIC)
INLINE Part part(const uint16_t* halves) { return (Part)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))); }
#else
// The exponent is moved to where a float has it; the multiplication also makes numbers below the smallest normal one right.
INLINE Part part(const uint16_t* halves) {
    const Words w = words_at(halves), endless = (Words)((Ints)(w & 0x7c00u) == 0x7c00);
    const Words size = (Words)((Floats)((w & 0x7fffu) << 13) * 0x1p112f);
    return (Floats)(size | (endless & 0x7f800000u) | (w & 0x8000u) << 16);
}
#endif
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
#endif
INLINE V load_half(const uint16_t* p) { return each<V>([&](int i) { return part(p + i * WIDE); }); }

#if defined(__AVX2__) && !defined(OUTRIDER_ISA_GENERIC)
constexpr int WHOLE_ROWS = 4;
constexpr int strips_for(int sums) { return sums > 2 ? 1 : sums > 1 ? STRIPS : 2 * STRIPS; }
#define OUTRIDER_SHORT_SUMS
constexpr bool BYTES_BEGIN_LESS = false;
INLINE Part without_bias(Whole sum, float scale, float minus) { return (Part)_mm256_fmadd_ps((__m256)sum, _mm256_set1_ps(scale), _mm256_set1_ps(minus)); }
typedef __m256i Shorts;
struct Signed {
    __m256i sizes, numbers;
};
INLINE Shorts products(Bytes w, int32_t four) { return _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(four)); }
INLINE Shorts plus(Shorts a, Shorts b) { return _mm256_add_epi16(a, b); }
INLINE Whole whole(Shorts pairs) { return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
INLINE Signed less_128(Bytes w) {
    const __m256i found = _mm256_xor_si256((__m256i)w, _mm256_set1_epi8(-128));
    return {_mm256_abs_epi8(found), found};
}
INLINE Shorts products(const Signed& w, int32_t four) { return _mm256_maddubs_epi16(w.sizes, _mm256_sign_epi8(_mm256_set1_epi32(four), w.numbers)); }
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(OUTRIDER_ISA_GENERIC)
#define OUTRIDER_NEON_DOT
#else
constexpr int WHOLE_ROWS = 1;
constexpr int strips_for(int) { return STRIPS; }
constexpr bool BYTES_BEGIN_LESS = true;
INLINE Part without_bias(Whole sum, float scale, float) { return floats(sum - 0x4b400000) * scale; }  // it may have no multiply-add
template <int v> INLINE void add_bytes(Whole& sum, Bytes w, const int8_t* inputs) {
    for (int j = 0; j < 4; j++) sum += (Ints)(w >> 8 * j & 255u) * int32_t(inputs[4 * v + j]);
}
template <int v> INLINE void add_small(Whole& sum, Bytes w, const int8_t* inputs) { add_bytes<v>(sum, w, inputs); }
#endif
#endif
// Numbers of an even input and of the next. Where a conversion is slow, what is found lacks a factor: each input is multiplied with LIFT,
// and so is the sum.
#if defined(__ARM_NEON) && !defined(OUTRIDER_ISA_GENERIC)
template <> constexpr float LIFT<half> = 0x1p56f;
// A half's exponent and fraction where a float has them are the number times 2^-112.
INLINE V lowered(const half* from) {
    const auto four = [](int32x4_t moved) { return (Floats)(vreinterpretq_u32_s32(moved) & vdupq_n_u32(0x8fffffffu)); };
    const int16x8_t low = vld1q_s16(reinterpret_cast<const int16_t*>(from)), high = vld1q_s16(reinterpret_cast<const int16_t*>(from + 8));
    return V{{four(vshll_n_s16(vget_low_s16(low), 13)), four(vshll_high_n_s16(low, 13)), four(vshll_n_s16(vget_low_s16(high), 13)), four(vshll_high_n_s16(high, 13))}};
}
INLINE void load_pair(const half* from, V& even, V& odd) { even = lowered(from), odd = lowered(from + LANES); }
#else
INLINE void load_pair(const half* from, V& even, V& odd) { even = load_half(&from->bits), odd = load_half(&from[LANES].bits); }
#endif
#if defined(OUTRIDER_NEON_DOT)
#include "neon_dot.hpp"
#else
#include "spans.hpp"
#endif
constexpr int STRIP = LANES / STRIPS;

#if !defined(__AVX512VNNI__) || defined(OUTRIDER_ISA_GENERIC)
// A span of R rows times those of N strips, the first of which is `strip`; blocks are `apart`
template <int R, int N, class W> INLINE void add_strips(const InputSpan* x, const W* w, size_t apart, int strip, int span, Part (*acc)[N]) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (add_strip<R>(x, w[i / STRIPS * apart], strip + i % STRIPS, span, &acc[0][i], N), ...);
    }(std::make_integer_sequence<int, N>());
}
// Weights are not written out for more rows.
constexpr bool SPREADS = false;
template <class W> struct SpreadSpan { void put(const W&, int) {} };
template <int R, int N, class W> INLINE void add_spread(const InputSpan*, const SpreadSpan<W>*, size_t, Part (*)[N]) {}
#endif
