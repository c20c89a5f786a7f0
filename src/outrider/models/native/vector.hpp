// Sixteen floats at a time, in the compiler's own vector types: AVX-512, AVX2 or NEON code from one text.
// Every function here works lane by lane, so a number never depends on its neighbours.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float V __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef uint16_t bf16;

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504088896341f;  // e^x = 2^(x LOG2_E)

static inline V load(const float* p) { V v; memcpy(&v, p, 64); return v; }
static inline void store(float* p, V v) { memcpy(p, &v, 64); }
static inline V splat(float x) { return V{} + x; }
static inline V bits(U u) { V v; memcpy(&v, &u, 64); return v; }
static inline U bits(V v) { U u; memcpy(&u, &v, 64); return u; }

// Round to nearest even; the values here are never NaN on purpose, and a NaN stays one.
static inline bf16 to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return bf16((u >> 16) | 64);
    return bf16((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline float to_float(bf16 h) {
    uint32_t u = uint32_t(h) << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static inline V load(const bf16* p) {
#if defined(__AVX512F__)
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#else
    H h;
    memcpy(&h, p, 32);
    return bits(__builtin_convertvector(h, U) << 16);
#endif
}
static inline V load(const int8_t* p) {
#if defined(__AVX512F__)
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    typedef int8_t Bytes __attribute__((vector_size(16)));
    Bytes bytes;
    memcpy(&bytes, p, 16);
    return __builtin_convertvector(__builtin_convertvector(bytes, I), V);
#endif
}
static inline void store(bf16* p, V v) {
#if defined(__AVX512BF16__)  // the same, but what is too small for a normal number is zero, as it is to tiles
    const auto h = _mm512_cvtneps_pbh((__m512)v);
#else
    U u = bits(v);
    U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    U nan = (u >> 16) | 64;
    U is_nan = (U)((I)(u & 0x7fffffffu) > 0x7f800000);
    H h = __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), H);
#endif
    memcpy(p, &h, 32);
}

static inline V select(I mask, V yes, V no) { return mask ? yes : no; }
static inline V max(V a, V b) {
#if defined(__AVX512F__)
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
static inline float sum(V v) {  // a fixed tree of additions
    float x[LANES];
    store(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}
static inline float largest(V v) {
    float x[LANES], best;
    store(x, v);
    best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial in r, n put into the exponent. 0 below -87.
static inline V exp(V x) {
#if defined(__AVX512F__)
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const V n = (V)_mm512_roundscale_ps((__m512)(x * LOG2_E), 0);
    const V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V y = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f}) y = y * r + c;
    return (V)_mm512_maskz_scalef_ps(is_kept, (__m512)y, (__m512)n);
#else
    const V low = splat(-87.0f), high = splat(88.0f);
    I tiny = x < low;
    x = select(x > high, high, select(tiny, low, x));
    V n = x * LOG2_E + splat(12582912.0f);
    I k = (I)(bits(n) - bits(splat(12582912.0f)));
    n = n - splat(12582912.0f);
    V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    V scale = bits((U)((k + 127) << 23));
    return select(tiny, splat(0.0f), y * scale);
#endif
}
#if defined(__AVX512F__)
static inline V exp2(V x) {  // to two units in the last place, in fewer steps: for what becomes bfloat16
    const V n = (V)_mm512_roundscale_ps((__m512)x, 0), r = x - n;
    V y = splat(1.3264727124e-03f);
    for (float c : {9.6715126448e-03f, 5.5507337435e-02f, 2.4022242085e-01f, 6.9314697760e-01f, 1.0f}) y = y * r + c;
    return (V)_mm512_scalef_ps((__m512)y, (__m512)n);
}
#endif
static inline V inverse(V x) {  // 1 / x, or 0 for what is too large; a rough one improved once where there is one
#if defined(__AVX512F__)
    const V rough = (V)_mm512_rcp14_ps((__m512)x);
    return rough + rough * (1.0f - x * rough);
#else
    return 1.0f / x;
#endif
}
static inline V tanh(V x) {  // 1 - 2 / (e^2x + 1)
    return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
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

// Asks the system to lay this out on large pages, which spares the address tables.
static inline void on_large_pages([[maybe_unused]] void* from, [[maybe_unused]] size_t size) {
#if defined(__linux__)
    madvise(from, size, MADV_HUGEPAGE);
#endif
}
// Memory that begins with a cache line, or everything that is read from it would come from two at a time. Much of it lies on large
// pages. It only grows.
template <class T> class Memory {
  public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { free(begin); }
    T* data() const { return begin; }
    T* grow(size_t size) {
        if (size <= room) return begin;
        const bool is_large = size * sizeof(T) >= LARGE;
        const size_t unit = is_large ? LARGE_PAGE : 64, bytes = (size * sizeof(T) + unit - 1) / unit * unit;
        free(begin);
        begin = static_cast<T*>(aligned_alloc(unit, bytes));
        if (is_large) on_large_pages(begin, bytes);
        memset(begin, 0, bytes);
        room = bytes / sizeof(T);
        return begin;
    }

  private:
    static constexpr size_t LARGE = 1 << 16, LARGE_PAGE = 1 << 21;
    T* begin = nullptr;
    size_t room = 0;
};
