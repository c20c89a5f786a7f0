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
    const int8_t* inputs(int row, int k) const { return numbers + size_t(row) * stride + k * SPAN; }
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

// What a sum of products with weights less ZERO begins with
template <class W> INLINE Whole begin(int32_t inputs) {
    if constexpr (W::BITS == 8) return begin_bytes(inputs);
    else return whole(-W::ZERO * inputs);
}
// R rows times the vectors v and v + 4 of a span, for the outputs of a strip
template <int R, int v, class W> INLINE void add_two(Rounded x, const W& w, int strip, int span, int k, Whole (&sums)[R][W::GROUPS]) {
    Bytes low, high;
    w.template two<v>(strip, span, low, high);
    for (int r = 0; r < R; r++) {
        Whole &first = sums[r][0], &second = sums[r][W::GROUPS - 1];
        if constexpr (W::BITS == 8) add_bytes<v>(first, low, x.inputs(r, k)), add_bytes<v + 4>(second, high, x.inputs(r, k));
        else add_small<v>(first, low, x.inputs(r, k)), add_small<v + 4>(second, high, x.inputs(r, k));
    }
}
// A span of R rows times that of the outputs of a strip
template <int R, class W> INLINE void add_strip(Rounded x, const W& w, int strip, int span, int k, Part* acc, int apart) {
    Whole sums[R][W::GROUPS];
    for (int r = 0; r < R; r++) {
        const int32_t* inputs = x.span(r, k).whole;
        if constexpr (W::GROUPS == 1) sums[r][0] = begin<W>(inputs[0] + inputs[1]);
        else sums[r][0] = begin<W>(inputs[0]), sums[r][1] = begin<W>(inputs[1]);
    }
    [&]<int... v>(std::integer_sequence<int, v...>) {
        (add_two<R, v>(x, w, strip, span, k, sums), ...);
    }(std::make_integer_sequence<int, 4>());
    for (int group = 0; group < W::GROUPS; group++) {
        const Part scale = w.scale(strip, span, group);
        for (int r = 0; r < R; r++) acc[r * apart] += (scale * x.span(r, k).scale) * floats(sums[r][group]);
    }
    if constexpr (W::HAS_OFFSETS) {
        const Part offset = w.offset(strip, span);
        for (int r = 0; r < R; r++) acc[r * apart] += offset * x.span(r, k).sum;
    }
}
// R rows times B blocks
template <int R, int B, class W> static void multiply_stored(Rounded x, const W* w, int units, float* found, int wide) {
    constexpr int ALL = B * STRIPS;
    Part acc[R][ALL] = {};
    for (int unit = 0; unit < units; unit++)
        for (int span = 0; span < W::SPANS; span++)
            for (int i = 0; i < ALL; i++)
                add_strip<R>(x, w[size_t(i / STRIPS) * units + unit], i % STRIPS, span, unit * W::SPANS + span, &acc[0][i], ALL);
    for (int r = 0; r < R; r++) memcpy(found + size_t(r) * wide, acc[r], sizeof acc[r]);
}
// Any rows times `count` blocks: R rows and as many blocks at a time as there are registers for, then fewer rows
template <int R, class W> static void multiply_stored_rows(int rows, Rounded x, const W* w, int count, int units, float* found, int wide) {
    constexpr int B = std::max(1, std::min(GROUP, WHOLE_SUMS / (R * W::GROUPS)));
    int first = 0;
    for (; first + R <= rows; first += R) {
        const auto multiply_blocks = [&]<int N>(int b) {
            multiply_stored<R, N>(x.from(first), w + size_t(b) * units, units, found + size_t(first) * wide + b * BLOCK, wide);
        };
        int b = 0;
        for (; b + B <= count; b += B) multiply_blocks.template operator()<B>(b);
        for (; b < count; b++) multiply_blocks.template operator()<1>(b);
    }
    if constexpr (R > 1) {
        constexpr int FEWER = R > 4 ? R / 2 : R - 1;
        multiply_stored_rows<FEWER>(rows - first, x.from(first), w, count, units, found + size_t(first) * wide, wide);
    }
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
            multiply_stored_rows<WHOLE_ROWS>(rows, x, from, end - begin, w.width / W::WIDTH, found + begin * BLOCK, WIDTH);
        });
    }
}
