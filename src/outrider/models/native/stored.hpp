// Matrices as a GGUF file stores them, in blocks of 32 weights with a scale: multiplied without being unpacked to floats.
//
// Inputs are rounded to 8 bits, 32 at a time with a scale of their own, as llama.cpp does (its scale has 16 bits, ours 32). The
// products of a block are added as whole numbers, exactly; then
//
//     y += (scale * input_scale) * (sum of weight * input - ZERO * sum of inputs)  [+ offset * input_scale * sum of inputs]
//
// block after block in order: one chain of additions for each output, whatever the number of rows.
#pragma once
#include <cmath>

#include "blocks.hpp"
#include "isa/dot.hpp"

constexpr int SPAN = 32;  // inputs that share a scale

// 16 outputs x 32 inputs. Of 4 bits, byte [step][output][j] has the weight of input 4 step + j in its low half, that of input
// 16 + 4 step + j in its high half. A weight is the number minus ZERO.
template <int BITS_, int ZERO_, bool HAS_OFFSETS_, int FILE_BYTES_> struct Stored {
    static constexpr int BITS = BITS_, ZERO = ZERO_, FILE_BYTES = FILE_BYTES_;  // FILE_BYTES: of 32 weights of one output
    static constexpr bool HAS_OFFSETS = HAS_OFFSETS_;
    uint8_t weights[BITS * SPAN * BLOCK / 8];
    uint16_t scales[(HAS_OFFSETS ? 2 : 1) * BLOCK];  // then the offsets
};
typedef Stored<8, 128, false, 34> Q8_0;
typedef Stored<4, 8, false, 18> Q4_0;
typedef Stored<4, 0, true, 20> Q4_1;
template <> constexpr int weights_in<Q8_0> = SPAN * BLOCK;
template <> constexpr int weights_in<Q4_0> = SPAN * BLOCK;
template <> constexpr int weights_in<Q4_1> = SPAN * BLOCK;
template <class W> constexpr bool is_stored = weights_in<W> > 1;

// From the rows of a file: [out][in / 32] of scale, offset where there is one, weights
template <class W> static void pack_stored(W* to, const uint8_t* from, int out, int in) {
    constexpr int HEAD = W::HAS_OFFSETS ? 4 : 2, COUNT = W::FILE_BYTES - HEAD;
    static_assert(sizeof(W) == W::FILE_BYTES * BLOCK);
    const int spans = in / SPAN;
    memset(static_cast<void*>(to), 0, sizeof(W) * spans * (up(out, BLOCK) / BLOCK));
    for (int j = 0; j < out; j++)
        for (int k = 0; k < spans; k++) {
            W& at = to[size_t(j / BLOCK) * spans + k];
            const uint8_t* block = from + (size_t(j) * spans + k) * W::FILE_BYTES;
            memcpy(at.scales + j % BLOCK, block, 2);
            if constexpr (W::HAS_OFFSETS) memcpy(at.scales + BLOCK + j % BLOCK, block + 2, 2);
            for (int i = 0; i < COUNT; i++)  // signed bytes become unsigned ones, 128 more
                at.weights[i / 4 * 4 * BLOCK + j % BLOCK * 4 + i % 4] = block[HEAD + i] ^ (W::BITS == 8 ? 128 : 0);
        }
}

// Inputs in 8 bits
struct Rounded {
    struct Span {
        float scale, sum;  // sum: of the 32 rounded inputs
        int32_t whole;     // sum / scale
    };
    const int8_t* numbers;
    const Span* spans;
    int stride;
    Rounded from(int row) const { return {numbers + size_t(row) * stride, spans + size_t(row) * (stride / SPAN), stride}; }
    const Span& span(int row, int k) const { return spans[size_t(row) * (stride / SPAN) + k]; }
    int32_t four(int row, int k, int step) const {
        int32_t word;
        memcpy(&word, numbers + size_t(row) * stride + k * SPAN + step * 4, 4);
        return word;
    }
};
class RoundedRows {
  public:
    void reshape(int rows, int width) {
        stride = up(width, SPAN);
        numbers.grow(size_t(rows) * stride), spans.grow(size_t(rows) * (stride / SPAN));
    }
    Rounded group(int first) const { return Rounded{numbers.data(), spans.data(), stride}.from(first); }
    void round(int row, const float* x, int width) {
        for (int k = 0; k < width / SPAN; k++)
            spans.data()[size_t(row) * (stride / SPAN) + k] = rounded_span(x + k * SPAN, numbers.data() + size_t(row) * stride + k * SPAN);
    }

  private:
    static Rounded::Span rounded_span(const float* x, int8_t* to) {
        int32_t sum = 0;
        const V low = load(x), high = load(x + LANES);
        const float most = largest(max(max(low, -low), max(high, -high))), scale = most / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
        for (int i = 0; i < SPAN; i++) {
            const int32_t number = int32_t(std::min(127.0f, std::max(-127.0f, std::rint(x[i] * inverse))));  // to nearest even
            to[i] = int8_t(number), sum += number;
        }
        return {scale, scale * float(sum), sum};
    }
    Memory<int8_t> numbers;
    Memory<Rounded::Span> spans;
    int stride = 0;
};

// R rows times B blocks, 32 inputs of them: whole numbers
template <int R, int B, class W> INLINE void add_span(Rounded x, Blocks<W> w, int k, I (&sums)[R][B]) {
    for (int step = 0; step < SPAN / 8; step++)
        for (int b = 0; b < B; b++) {
            const uint8_t* from = w.after(b).at[k].weights + step * 64;
            if constexpr (W::BITS == 4) {
                const Bytes both = load_bytes(from), low = low_halves(both), high = high_halves(both);
                for (int r = 0; r < R; r++) add_small(sums[r][b], low, x.four(r, k, step)), add_small(sums[r][b], high, x.four(r, k, step + 4));
            } else {
                const Bytes low = load_bytes(from), high = load_bytes(from + 256);
                for (int r = 0; r < R; r++) add_bytes(sums[r][b], low, x.four(r, k, step)), add_bytes(sums[r][b], high, x.four(r, k, step + 4));
            }
        }
}
template <int R, int B, class W> static void multiply_stored(Rounded x, Blocks<W> w, float* found, int wide) {
    V acc[R][B] = {};
    for (int k = 0; k < w.width / SPAN; k++) {
        I sums[R][B];
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) sums[r][b] = whole(-W::ZERO * x.span(r, k).whole);
        add_span<R, B>(x, w, k, sums);
        for (int b = 0; b < B; b++) {
            const uint16_t* scales = w.after(b).at[k].scales;
            const V scale = load_half(scales);
            for (int r = 0; r < R; r++) acc[r][b] += (scale * x.span(r, k).scale) * floats(sums[r][b]);
            if constexpr (W::HAS_OFFSETS) {
                const V offset = load_half(scales + BLOCK);
                for (int r = 0; r < R; r++) acc[r][b] += offset * x.span(r, k).sum;
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(found + size_t(r) * wide + b * BLOCK, acc[r][b]);
}
// R rows times `count` blocks, B at a time
template <int R, int B, class W> static void multiply_stored_some(Rounded x, Blocks<W> w, int count, float* found, int wide) {
    int b = 0;
    for (; b + B <= count; b += B) multiply_stored<R, B>(x, w.after(b), found + b * BLOCK, wide);
    if constexpr (B > 1)
        if (b < count) multiply_stored_some<R, B - 1>(x, w.after(b), count - b, found + b * BLOCK, wide);
}
template <int R, class W> static void multiply_stored_up_to(int rows, Rounded x, Blocks<W> w, int count, float* found, int wide) {
    if constexpr (R > 1)
        if (rows < R) return multiply_stored_up_to<R - 1>(rows, x, w, count, found, wide);
    multiply_stored_some<R, std::max(1, std::min(GROUP, WHOLE_SUMS / R))>(x, w, count, found, wide);
}
// Up to 64 rows times `count` blocks
template <class W, class C>
static void multiply_group(int rows, Rounded x, Blocks<W> w, int count, Blocks<W>, float* found, C&) {
    constexpr int WIDTH = GROUP * BLOCK;
    for (int first = 0; first < rows; first += WHOLE_ROWS)
        multiply_stored_up_to<WHOLE_ROWS>(std::min(WHOLE_ROWS, rows - first), x.from(first), w, count, found + size_t(first) * WIDTH, WIDTH);
}
