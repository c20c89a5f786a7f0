// NEON's dot product of bfloat16: two inputs times two weights, added to each of four outputs.
//
// The instruction rounds in its own way, the same for every row. So bfloat16 models have other bits here than on sets that widen, and
// each row has its own bits whatever shares the pass.
#pragma once

constexpr bool DOTS_BRAIN = true;

// The next four inputs of a row, which are floats that hold bfloat16
struct FourInputs {
    bfloat16x4_t numbers;
    explicit FourInputs(const float* x) {
        const uint16x8_t halves = vreinterpretq_u16_f32(vld1q_f32(x));
        numbers = vreinterpret_bf16_u16(vget_low_u16(vuzp2q_u16(halves, halves)));
    }
};
template <int PAIR, int R, int B, class F> INLINE void add_pair(V (&acc)[R][B], const std::array<FourInputs, R>& inputs, F weights) {
    for (int b = 0; b < B; b++)
        for (int i = 0; i < PARTS; i++) {
            const bfloat16x8_t some = vreinterpretq_bf16_u16(vld1q_u16(&weights(b)[2 * i * WIDE].number));
            for (int r = 0; r < R; r++) {
                Floats& sum = acc[r][b].part[i];
                sum = (Floats)vbfdotq_lane_f32((float32x4_t)sum, some, inputs[r].numbers, PAIR);
            }
        }
}
