// Single numbers, and what all instruction sets share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef uint16_t bf16;
struct half { uint16_t bits; };  // a number of 16 bits (IEEE)

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504088896341f;  // e^x = 2^(x LOG2_E)

#define INLINE [[gnu::always_inline]] static inline

static inline int up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// What inputs and sums are multiplied with where weights of type W are read too small (dot.hpp)
template <class W> constexpr float LIFT = 1.0f;

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

// What is multiplied later, brought into the second-level cache meanwhile: `step` bytes for each input
struct Later {
    const char* at;
    int step;
    void bring(int k) const { __builtin_prefetch(at + size_t(k) * step, 0, 2); }
};
