// AVX-512's dot product of bfloat16: two inputs times two weights, added to each of sixteen outputs.
//
// The instruction rounds in its own way, the same for every row, and numbers too small for a normal one are zero to it. Inputs stay in
// memory until they are multiplied, since registers are full of sums: two of them are spread over a register, and a shuffle of bytes
// puts their upper halves together.
#pragma once

constexpr bool DOTS_BRAIN = true;

struct FourInputs {
    const float* at;  // floats that hold bfloat16
    explicit FourInputs(const float* x) : at(x) {}
    template <int PAIR> __m512bh pair() const {
        int64_t two;
        memcpy(&two, at + 2 * PAIR, 8);
        return (__m512bh)_mm512_shuffle_epi8(_mm512_set1_epi64(two), _mm512_set1_epi32(0x07060302));
    }
};
template <int PAIR, int R, int B, class F> INLINE void add_pair(V (&acc)[R][B], const std::array<FourInputs, R>& inputs, F weights) {
    __m512bh some[B];
    for (int b = 0; b < B; b++) some[b] = (__m512bh)_mm512_loadu_si512(weights(b));
    for (int r = 0; r < R; r++) {
        const __m512bh pair = inputs[r].template pair<PAIR>();
        for (int b = 0; b < B; b++) acc[r][b] = (V)_mm512_dpbf16_ps((__m512)acc[r][b], some[b], pair);
    }
}
