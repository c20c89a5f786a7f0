// Products with matrices as a GGUF file stores them (stored_types.hpp), without unpacking them to floats.
//
// Inputs are rounded to 8 bits, 32 at a time with a scale of their own, as llama.cpp does (its scale has 16 bits, ours 32; for K types it
// takes 256 at a time, we 32). The products of a group of weights are added as whole numbers, exactly; then
//
//     y += (scale * input_scale) * (sum of number * input - ZERO * sum of inputs)  [+ offset * input_scale * sum of inputs]
//
// group after group in order: one chain of additions for each output, whatever the number of rows.
#pragma once
#include <cmath>
#include <utility>

#include "stored_types.hpp"

// Inputs in 8 bits
struct Rounded {
    struct Span {
        float scale, sum;  // sum: of the 32 rounded inputs
        int32_t whole[2];  // sums of 16 / scale
    };
    const int8_t* numbers;
    const Span* spans;
    int stride;
    Rounded from(int row) const { return {numbers + size_t(row) * stride, spans + size_t(row) * (stride / SPAN), stride}; }
    const Span& span(int row, int k) const { return spans[size_t(row) * (stride / SPAN) + k]; }
    int32_t four(int row, int k, int v) const {
        int32_t word;
        memcpy(&word, numbers + size_t(row) * stride + k * SPAN + v * 4, 4);
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
        const V low = load(x), high = load(x + LANES);
        const float most = largest(max(max(low, -low), max(high, -high))), scale = most / 127.0f;
        const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;  // all but zero counts as zero
        const int32_t first = round_to_bytes(low * inverse, to), second = round_to_bytes(high * inverse, to + LANES);
        return {scale, scale * float(first + second), {first, second}};
    }
    Memory<int8_t> numbers;
    Memory<Rounded::Span> spans;
    int stride = 0;
};

// R rows times the vectors v and v + 4 of a span of B blocks, which lie `apart`
template <int R, int B, int v, class W>
INLINE void add_two(Rounded x, const W* w, size_t apart, int span, int k, I (&sums)[R][B][W::GROUPS]) {
    for (int b = 0; b < B; b++) {
        Bytes low, high;
        w[b * apart].template two<v>(span, low, high);
        for (int r = 0; r < R; r++) {
            I *first = sums[r][b], *second = first + W::GROUPS - 1;
            if constexpr (W::BITS == 8) add_bytes(*first, low, x.four(r, k, v)), add_bytes(*second, high, x.four(r, k, v + 4));
            else add_small(*first, low, x.four(r, k, v)), add_small(*second, high, x.four(r, k, v + 4));
        }
    }
}
// A span of R rows times that of B blocks
template <int R, int B, class W> INLINE void add_span(Rounded x, const W* w, size_t apart, int span, int k, V (&acc)[R][B]) {
    I sums[R][B][W::GROUPS];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) {
            const int32_t* whole_inputs = x.span(r, k).whole;
            if constexpr (W::GROUPS == 1) sums[r][b][0] = whole(-W::ZERO * (whole_inputs[0] + whole_inputs[1]));
            else sums[r][b][0] = whole(-W::ZERO * whole_inputs[0]), sums[r][b][1] = whole(-W::ZERO * whole_inputs[1]);
        }
    [&]<int... v>(std::integer_sequence<int, v...>) {
        (add_two<R, B, v>(x, w, apart, span, k, sums), ...);
    }(std::make_integer_sequence<int, 4>());
    for (int b = 0; b < B; b++) {
        for (int group = 0; group < W::GROUPS; group++) {
            const V scale = w[b * apart].scale(span, group);
            for (int r = 0; r < R; r++) acc[r][b] += (scale * x.span(r, k).scale) * floats(sums[r][b][group]);
        }
        if constexpr (W::HAS_OFFSETS) {
            const V offset = w[b * apart].offset(span);
            for (int r = 0; r < R; r++) acc[r][b] += offset * x.span(r, k).sum;
        }
    }
}
template <int R, int B, class W> static void multiply_stored(Rounded x, const W* w, int units, float* found, int wide) {
    V acc[R][B] = {};
    for (int unit = 0; unit < units; unit++)
        for (int span = 0; span < W::SPANS; span++) add_span<R, B>(x, w + unit, units, span, unit * W::SPANS + span, acc);
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(found + size_t(r) * wide + b * BLOCK, acc[r][b]);
}
// At most R rows times `count` blocks, as many at a time as there are registers for
template <int R, class W> static void multiply_stored_up_to(int rows, Rounded x, const W* w, int count, int units, float* found, int wide) {
    if constexpr (R > 1)
        if (rows < R) return multiply_stored_up_to<R - 1>(rows, x, w, count, units, found, wide);
    constexpr int B = std::max(1, std::min(GROUP, WHOLE_SUMS / (R * W::GROUPS)));
    int b = 0;
    for (; b + B <= count; b += B) multiply_stored<R, B>(x, w + size_t(b) * units, units, found + b * BLOCK, wide);
    for (; b < count; b++) multiply_stored<R, 1>(x, w + size_t(b) * units, units, found + b * BLOCK, wide);
}

struct AnyStored;  // any type, block by block
template <> struct Blocks<AnyStored> {
    const Place* at;
    int width;
    Blocks after(int count) const { return {at + count, width}; }
    static Blocks of(const Matrix& w, int first) { return {static_cast<const Place*>(w.packed) + first, w.in}; }
};
template <class W> constexpr bool is_stored = std::is_same_v<W, AnyStored>;

// Up to 64 rows times `count` blocks
template <class C>
static void multiply_group(int rows, Rounded x, Blocks<AnyStored> w, int count, Blocks<AnyStored>, float* found, C&) {
    constexpr int WIDTH = GROUP * BLOCK;
    for (int begin = 0, end = 0; begin < count; begin = end) {
        while (end < count && w.at[end].type == w.at[begin].type) end++;
        with_type(w.at[begin].type, [&]<class W>() {
            const W* from = static_cast<const W*>(w.at[begin].at);
            for (int first = 0; first < rows; first += WHOLE_ROWS)
                multiply_stored_up_to<WHOLE_ROWS>(std::min(WHOLE_ROWS, rows - first), x.from(first), from, end - begin,
                                                  w.width / W::WIDTH, found + size_t(first) * WIDTH + begin * BLOCK, WIDTH);
        });
    }
}
