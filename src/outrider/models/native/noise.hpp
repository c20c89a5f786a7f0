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
// argmax(logits / temperature + Gumbel noise) among the logits from `least` on; the argmax, the first of equals, at temperature 0
static int64_t choice(const float* logits, int size, float temperature, uint64_t key, float least = -INFINITY) {
    float best = -INFINITY;
    int64_t at = 0;
    if (temperature == 0) {
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
    for (int i = 0; i < size; i += 8) {
        const int count = size - i < 8 ? size - i : 8;
        bool is_kept = false;
        for (int j = 0; j < count; j++) is_kept |= logits[i + j] >= least;
        if (!is_kept) continue;
        const F8 noise = gumbel(key, i);
        for (int j = 0; j < count; j++) {
            const float score = logits[i + j] / temperature + noise[j];
            if (score > best && logits[i + j] >= least) best = score, at = i + j;
        }
    }
    return at;
}
// The share of `token` in the softmax of logits + temperature x noise, what `choice` ranks by, among the logits from `least` on
static float belief_in(int64_t token, const float* logits, int size, float temperature, uint64_t key, float least = -INFINITY) {
    float ranks[LANES];
    const auto look = [&](int i) {
        for (int j = 0; j < LANES; j += 8) {
            const F8 noise = temperature == 0 || i + j >= size ? F8{} : temperature * gumbel(key, i + j);
            for (int k = 0; k < 8; k++) {
                const int at = i + j + k;
                ranks[j + k] = at < size && logits[at] >= least ? logits[at] + noise[k] : -INFINITY;
            }
        }
        return load(ranks);
    };
    const V top = splat(lane(look(int(token) / LANES * LANES), int(token % LANES)));
    V total = splat(0);
    int i = 0;
    if (temperature == 0)
        for (; i + LANES <= size; i += LANES) total = total + exp(load(logits + i) - top);
    for (; i < size; i += LANES) total = total + exp(look(i) - top);
    return 1.0f / sum(total);
}

// The target's choices after the nodes of B trees: what sampling.py's Law.choices are where nothing but a temperature shapes the law.
extern "C" struct Choices {
    int32_t batch, nodes, vocab;
    const float* logits;               // [batch][nodes][vocab]
    const float* temperatures;         // [batch]
    const int64_t *seeds, *positions;  // [batch]
    const int64_t* depths;             // [batch][nodes]
    int64_t* out;                      // [batch][nodes]
};
static void choose_all(const Choices& c) {
    static thread_local std::vector<float> noise, scores;
    noise.resize(c.vocab), scores.resize(c.vocab);
    for (int b = 0; b < c.batch; b++)
        for (int n = 0, known = -1; n < c.nodes; n++) {
            const size_t at = size_t(b) * c.nodes + n;
            const float *logits = c.logits + at * c.vocab, temperature = c.temperatures[b];
            if (temperature > 0) {
                const int depth = int(c.depths[at]);  // nodes of one depth stand together
                if (depth != known) gumbel_stream(noise_key(c.seeds[b], c.positions[b] + depth), c.vocab, noise.data());
                known = depth;
                for (int i = 0; i < c.vocab; i++) scores[i] = logits[i] / temperature + noise[i];
                logits = scores.data();
            }
            c.out[at] = choice(logits, c.vocab, 0, 0);
        }
}
