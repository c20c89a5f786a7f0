// The random numbers of core/rng.py, eight at a time.
#pragma once
#include <vector>

#include "vector.hpp"

typedef uint64_t W __attribute__((vector_size(64)));
typedef double D __attribute__((vector_size(64)));
typedef float F8 __attribute__((vector_size(32)));

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;
template <class T> static inline T mix(T x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
static inline uint64_t noise_key(int64_t seed, int64_t position) {
    uint64_t key = mix(uint64_t(seed) + GOLDEN);
    key = mix(key + uint64_t(position) * GOLDEN + 1);  // 1: the purpose TARGET
    return mix(key + GOLDEN);
}
// ln x = e ln 2 + 2 artanh((m - 1) / (m + 1)), x = m 2^e with m near 1
static inline D log(D x) {
    W u;
    memcpy(&u, &x, 64);
    W shifted = u - 0x3fe6a09e667f3bcdull;  // bits of sqrt(1/2): m in [sqrt(1/2), sqrt(2))
    typedef int64_t S __attribute__((vector_size(64)));
    S e = (S)shifted >> 52;
    W mantissa = u - ((W)e << 52);
    D m;
    memcpy(&m, &mantissa, 64);
    D s = (m - 1.0) / (m + 1.0), z = s * s, y = D{} + 1.0 / 21;
    for (int k = 19; k >= 1; k -= 2) y = y * z + 1.0 / k;
    return __builtin_convertvector(e, D) * 0.6931471805599453 + 2.0 * s * y;
}
// Elements first + 1 .. first + 8 of a stream.
static inline F8 gumbel(uint64_t key, uint64_t first) {
    W counter;
    for (int j = 0; j < 8; j++) counter[j] = key + (first + j + 1) * GOLDEN;
    const D u = (__builtin_convertvector(mix(counter) >> 12, D) + 0.5) * 0x1p-52;
    return __builtin_convertvector(-log(-log(u)), F8);
}
static void gumbel_stream(uint64_t key, int size, float* out) {
    for (int i = 0; i < size; i += 8) {
        const F8 numbers = gumbel(key, i);
        memcpy(out + i, &numbers, size_t(size - i < 8 ? size - i : 8) * 4);
    }
}
// The largest, the first of equals
static int64_t first_best(const float* logits, int size) {
    float best = -INFINITY;
    int64_t at = 0;
    for (int i = 0; i < size; i += 512) {  // a quick look at each stretch first
        const int end = i + 512 < size ? i + 512 : size;
        V most = splat(-INFINITY);
        int j = i;
        for (; j + LANES <= end; j += LANES) most = max(most, load(logits + j));
        float top = largest(most);
        for (; j < end; j++) top = logits[j] > top ? logits[j] : top;
        if (!(top > best)) continue;
        best = top;
        for (at = i; logits[at] != best; at++) {}
    }
    return at;
}
// argmax(law + Gumbel noise) of a law in tempered logits. Noise is made where the law has tokens.
static int64_t choice(const float* law, int size, uint64_t key) {
    float best = -INFINITY;
    int64_t at = 0;
    for (int i = 0; i < size; i += 8) {
        const int count = size - i < 8 ? size - i : 8;
        bool is_kept = false;
        for (int j = 0; j < count; j++) is_kept |= law[i + j] > -INFINITY;
        if (!is_kept) continue;
        const F8 noise = gumbel(key, i);
        for (int j = 0; j < count; j++) {
            const float score = law[i + j] + noise[j];
            if (score > best) best = score, at = i + j;
        }
    }
    return at;
}
// The share of `token` in the softmax of temperature x (law + noise), what `choice` ranks by; of the law alone at temperature 0
static float belief_in(int64_t token, const float* law, int size, float temperature, uint64_t key) {
    float ranks[LANES];
    const auto look = [&](int i) {
        for (int j = 0; j < LANES; j += 8) {
            const F8 noise = temperature == 0 || i + j >= size ? F8{} : gumbel(key, i + j);
            for (int k = 0; k < 8; k++) {
                const int at = i + j + k;
                ranks[j + k] = at < size ? (temperature == 0 ? law[at] : temperature * (law[at] + noise[k])) : -INFINITY;
            }
        }
        return load(ranks);
    };
    const V top = splat(lane(look(int(token) / LANES * LANES), int(token % LANES)));
    V total = splat(0);
    int i = 0;
    if (temperature == 0)
        for (; i + LANES <= size; i += LANES) total = total + exp(load(law + i) - top);
    for (; i < size; i += LANES) total = total + exp(look(i) - top);
    return 1.0f / sum(total);
}
