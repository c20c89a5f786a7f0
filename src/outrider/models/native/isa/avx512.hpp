// AVX-512: one register of sixteen floats.
#pragma once
#include <immintrin.h>

#include "number.hpp"

typedef float V __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));

constexpr int QUERIES_AT_ONCE = 1;
constexpr int ACCUMULATORS = 16, MOST_TOGETHER = 4;  // of 32 registers
constexpr int MANY_ROWS = 12, MANY_BLOCKS = 2;
constexpr bool WIDENS_FIRST = false;
#if defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;
constexpr const char* ISA_NAME = "amx";
#else
constexpr bool HAS_TILES = false;
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
constexpr const char* ISA_NAME = "avx512_bf16";
#elif defined(__AVX512VNNI__)
constexpr const char* ISA_NAME = "avx512_vnni";
#else
constexpr const char* ISA_NAME = "avx512";
#endif
#endif

static inline V load(const float* p) { V v; memcpy(&v, p, 64); return v; }
static inline void store(float* p, V v) { memcpy(p, &v, 64); }
static inline V splat(float x) { return V{} + x; }
static inline V bits(U u) { V v; memcpy(&v, &u, 64); return v; }
static inline U bits(V v) { U u; memcpy(&u, &v, 64); return u; }
static inline V load(const bf16* p) {
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
}
static inline V load(const int8_t* p) {
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// [16][2]: the numbers of an even input are the lower halves of 16 words, those of the next the upper ones
static inline void load_pair(const bf16* from, V& even, V& odd) {
    U pair;
    memcpy(&pair, from, 64);
    even = bits(pair << 16), odd = bits(pair & 0xffff0000u);
}
static inline void load_pair(const int8_t* from, V& even, V& odd) { even = load(from), odd = load(from + LANES); }
static inline H to_halves(V v) {
#if defined(__AVX512BF16__)  // the same, but what is too small for a normal number is zero, as it is to tiles
    return (H)_mm512_cvtneps_pbh((__m512)v);
#else
    U u = bits(v);
    U nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    U nan = (u >> 16) | 64;
    U is_nan = (U)((I)(u & 0x7fffffffu) > 0x7f800000);
    return __builtin_convertvector((nearest & ~is_nan) | (nan & is_nan), H);
#endif
}
static inline void store(bf16* p, V v) {
    const H h = to_halves(v);
    memcpy(p, &h, 32);
}
static inline V rounded(V v) { return bits(__builtin_convertvector(to_halves(v), U) << 16); }
static inline V select(I mask, V yes, V no) { return mask ? yes : no; }
static inline V max(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
static inline float largest(V v) { return _mm512_reduce_max_ps((__m512)v); }

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial in r, n put into the exponent. 0 below -87.
static inline V exp(V x) {
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const V n = (V)_mm512_roundscale_ps((__m512)(x * LOG2_E), 0);
    const V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V y = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f}) y = y * r + c;
    return (V)_mm512_maskz_scalef_ps(is_kept, (__m512)y, (__m512)n);
}
static inline V exp2(V x) {  // to two units in the last place, in fewer steps: for what becomes bfloat16
    const V n = (V)_mm512_roundscale_ps((__m512)x, 0), r = x - n;
    V y = splat(1.3264727124e-03f);
    for (float c : {9.6715126448e-03f, 5.5507337435e-02f, 2.4022242085e-01f, 6.9314697760e-01f, 1.0f}) y = y * r + c;
    return (V)_mm512_scalef_ps((__m512)y, (__m512)n);
}
template <class T> static inline V exp_of_minus(V x) {
    if constexpr (sizeof(T) == 2) return exp2((V)_mm512_min_ps((__m512)(x * -LOG2_E), _mm512_set1_ps(126.0f)));
    return exp(-x);
}
static inline V inverse(V x) {  // 1 / x, or 0 for what is too large; a rough one improved once
    const V rough = (V)_mm512_rcp14_ps((__m512)x);
    return rough + rough * (1.0f - x * rough);
}

static inline V shuffle(V a, V b, I at) {
#if defined(__clang__)
    V v;
    for (int i = 0; i < LANES; i++) v[i] = at[i] < LANES ? a[at[i]] : b[at[i] - LANES];
    return v;
#else
    return __builtin_shuffle(a, b, at);
#endif
}
// Sixteen vectors in, the vector of their sums out.
template <int W> static inline V halves(V a, V b) {
    I low, high;
    for (int i = 0; i < LANES; i++) {
        int lane = i % 8, base = i < 8 ? 0 : LANES;  // lanes of a, then lanes of b
        int at = (lane / W) * 2 * W + lane % W;
        low[i] = base + at;
        high[i] = base + at + W;
    }
    return shuffle(a, b, low) + shuffle(a, b, high);
}
static inline V sums(const V* v) {
    V a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = halves<8>(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < 4; i++) b[i] = halves<4>(a[2 * i], a[2 * i + 1]);
    for (int i = 0; i < 2; i++) c[i] = halves<2>(b[2 * i], b[2 * i + 1]);
    return halves<1>(c[0], c[1]);
}
// C vectors of sixteen dimensions; 0: any number of them
template <int C, class T> static inline V dots_of(const float* query, const T* const* keys, int chunks) {
    V products[LANES];
    for (int j = 0; j < LANES; j++) {
        products[j] = V{};
        for (int c = 0; c < (C ? C : chunks); c++) products[j] += load(query + c * LANES) * load(keys[j] + c * LANES);
    }
    return sums(products);
}
template <int Q, class T> static inline void dots(const float* const* queries, const T* const* keys, int dim, V* found) {
    for (int q = 0; q < Q; q++) {
        if (dim == 4 * LANES) found[q] = dots_of<4>(queries[q], keys, 4);
        else if (dim == 8 * LANES) found[q] = dots_of<8>(queries[q], keys, 8);
        else found[q] = dots_of<0>(queries[q], keys, dim / LANES);
    }
}

// Sixteen numbers of each of sixteen rows -> sixteen rows of one number of each
template <class T> static inline void transposed(const T* const* rows, int at, float* to) {
    const auto pairs = [](__m512 a, __m512 b, bool upper) { return upper ? _mm512_unpackhi_ps(a, b) : _mm512_unpacklo_ps(a, b); };
    const auto quads = [](__m512 a, __m512 b, bool upper) {
        return _mm512_castpd_ps(upper ? _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)) : _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    __m512 a[LANES], b[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) a[i] = (__m512)load(rows[i] + at);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) b[i] = pairs(a[i / 2 * 2], a[i / 2 * 2 + 1], i % 2);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) a[i] = quads(b[i / 4 * 4 + i % 4 / 2], b[i / 4 * 4 + i % 4 / 2 + 2], i % 2);  // quarters of row i % 4 of each
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
        const __m512 later_low = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88), later_high = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
        _mm512_store_ps(to + i * LANES, _mm512_shuffle_f32x4(low, later_low, 0x88)), _mm512_store_ps(to + (8 + i) * LANES, _mm512_shuffle_f32x4(low, later_low, 0xdd));
        _mm512_store_ps(to + (4 + i) * LANES, _mm512_shuffle_f32x4(high, later_high, 0x88)), _mm512_store_ps(to + (12 + i) * LANES, _mm512_shuffle_f32x4(high, later_high, 0xdd));
    }
}
// What dots adds up in lanes L, L + W, L + 2 W, ... and then adds together, for Q queries and sixteen keys, a dimension of all in a row
template <int Q, int L, int W> static inline void sums_across(const float* const* queries, const float* columns, int chunks, V (&found)[Q]) {
    if constexpr (W == LANES) {
        for (int q = 0; q < Q; q++) found[q] = V{};
        for (int d = L; d < chunks * LANES; d += LANES) {
            const V column = load(columns + d * LANES);
            for (int q = 0; q < Q; q++) found[q] += queries[q][d] * column;
        }
    } else {
        V other[Q];
        sums_across<Q, L, 2 * W>(queries, columns, chunks, found);
        sums_across<Q, L + W, 2 * W>(queries, columns, chunks, other);
        for (int q = 0; q < Q; q++) found[q] += other[q];
    }
}
// The bits of `dots`, for many queries: put(query, V) takes the products of one
constexpr int LEAST_ACROSS = 8, MOST_ACROSS = 1024;  // queries; dimensions
template <class T, class F> static inline void dots_across(const float* const* queries, int count, const T* const* keys, int dim, const F& put) {
    alignas(64) static thread_local float columns[MOST_ACROSS * LANES];
    for (int d = 0; d < dim; d += LANES) transposed(keys, d, columns + d * LANES);
    const auto some = [&]<int Q>(int n) {
        V found[Q];
        if (dim == 4 * LANES) sums_across<Q, 0, 1>(queries + n, columns, 4, found);
        else sums_across<Q, 0, 1>(queries + n, columns, dim / LANES, found);
        for (int q = 0; q < Q; q++) put(n + q, found[q]);
    };
    int n = 0;
    for (; n + 4 <= count; n += 4) some.template operator()<4>(n);
    for (; n < count; n++) some.template operator()<1>(n);
}
#include "no_panel.hpp"
