// Products with matrices as a GGUF file stores them (stored_types.hpp), without unpacking them to floats.
//
// Inputs are rounded to 8 bits, 32 at a time with a scale of their own, as llama.cpp does (its scale has 16 bits, ours 22; for K types it
// takes 256 at a time, we 32). The products of a group of weights are added as whole numbers, exactly; then
//
//     y += (scale * input_scale) * (sum of number * input - ZERO * sum of inputs)  [+ offset * input_scale * sum of inputs]
//
// group after group in order: one chain of additions for each output, whatever the number of rows.
#pragma once
#include <cmath>
#include <utility>

#include "isa/whole_tiles.hpp"
#include "span_rows.hpp"
#include "stored_types.hpp"

// Inputs in 8 bits
typedef Spans<InputSpan, PANEL_ROWS> Rounded;
typedef SpanRows<InputSpan, PANEL_ROWS> RoundedRows;

static inline float short_scale(float scale) {  // no smaller, with 22 bits: three times as much is a float too
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 3) & ~3u;
    memcpy(&scale, &bits, 4);
    return scale;
}
static inline void round_span(const float* x, InputSpan& to) {
    const float scale = short_scale(largest_of_span(x) / 127.0f);
    const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;  // all but zero counts as zero
    const int32_t first = round_to_bytes(load(x) * inverse, to.numbers), second = round_to_bytes(load(x + LANES) * inverse, to.numbers + LANES);
    to.put(scale, first, second);
}

// R rows times N strips, the first of which is `first`; what units [begin, end) add to what was found before them
template <int R, int N, class W>
static void multiply_stored(Rounded x, const W* w, int units, int first, int begin, int end, float* found, int wide) {
    Part acc[R][N];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) acc[r][i] = begin ? part(found + size_t(r) * wide + (first + i) * STRIP) : Part{};
    w += size_t(first / STRIPS) * units;
    const int strip = first % STRIPS;
    const InputSpan* at = x.at(begin * W::SPANS);
    constexpr int SHARE = N < STRIPS ? sizeof(W) * N / STRIPS : 0;  // of the next block, brought near by every pass over this one
    const char* later = reinterpret_cast<const char*>(w + units) + size_t(strip / N) * units * SHARE;
    for (int unit = begin; unit < end; unit++) {
        for (int line = 0; line < SHARE; line += 64) __builtin_prefetch(later + size_t(unit) * SHARE + line, 0, 3);
        for (int span = 0; span < W::SPANS; span++, at += PANEL_ROWS)
            [&]<int... i>(std::integer_sequence<int, i...>) {
                (add_strip<R>(at, w[size_t(i / STRIPS) * units + unit], strip + i % STRIPS, span, &acc[0][i], N), ...);
            }(std::make_integer_sequence<int, N>());
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) {
            const Part one = acc[r][i];
            memcpy(found + size_t(r) * wide + (first + i) * STRIP, &one, sizeof one);
        }
}
// R rows times `count` blocks: as many strips at a time as there are registers for, and few enough inputs for the first-level cache
template <int R, class W> static void multiply_stored_rows(Rounded x, const W* w, int count, int units, float* found, int wide) {
    constexpr int N = std::min(GROUP * STRIPS, strips_for(R * W::GROUPS)), AT_ONCE = 1024 / W::WIDTH;
    for (int begin = 0; begin < units; begin += AT_ONCE) {
        const int end = std::min(units, begin + AT_ONCE);
        int strip = 0;
        for (; strip + N <= count * STRIPS; strip += N) multiply_stored<R, N>(x, w, units, strip, begin, end, found, wide);
        if constexpr (N > STRIPS)
            for (; strip < count * STRIPS; strip += STRIPS) multiply_stored<R, STRIPS>(x, w, units, strip, begin, end, found, wide);
    }
}
// At most R rows of a panel: all of R where one is missing (what is found for it is not used), or half of them, then the rest
template <int R, class W> static void multiply_stored_up_to(int rows, Rounded x, const W* w, int count, int units, float* found, int wide) {
    if constexpr (R > 1)
        if (rows < R && (R < 4 || rows < R - 1)) {
            multiply_stored_up_to<R / 2>(std::min(rows, R / 2), x, w, count, units, found, wide);
            if (rows > R / 2) multiply_stored_up_to<R / 2>(rows - R / 2, {x.spans + R / 2, x.num_spans}, w, count, units, found + size_t(R / 2) * wide, wide);
            return;
        }
    multiply_stored_rows<R>(x, w, count, units, found, wide);
}

struct AnyStored;  // any type, block by block
template <> struct Blocks<AnyStored> {
    const Place* at;
    int width;
    Blocks after(int count) const { return {at + count, width}; }
    static Blocks of(const Matrix& w, int first) { return {static_cast<const Place*>(w.packed) + first, w.in}; }
};
template <class W> constexpr bool is_stored = std::is_same_v<W, AnyStored>;

// All rows times `count` blocks of a type
template <class W> static void multiply_blocks_of(int rows, Rounded x, const W* w, int count, int units, float* found, int wide) {
    if (rows < LEAST_TILE_ROWS) {
        for (int row = 0; row < rows; row += WHOLE_ROWS)
            multiply_stored_up_to<WHOLE_ROWS>(std::min(rows - row, WHOLE_ROWS), x.from(row), w, count, units, found + size_t(row) * wide, wide);
        return;
    }
    shape_whole_tiles(rows);
    for (int b = 0; b < count; b++, w += units) {
        const uint8_t* numbers = spread(w, units);
        for (int row = 0; row < rows; row += PANEL_ROWS)
            multiply_panel_by_tiles(std::min(rows - row, PANEL_ROWS), x.from(row).spans, w, numbers, units, found + size_t(row) * wide + b * BLOCK, wide);
    }
}
// Up to 64 rows times `count` blocks
template <class C>
static void multiply_group(int rows, Rounded x, Blocks<AnyStored> w, int count, Blocks<AnyStored>, float* found, C&) {
    constexpr int WIDTH = GROUP * BLOCK;
    for (int begin = 0, end = 0; begin < count; begin = end) {
        while (end < count && w.at[end].type == w.at[begin].type) end++;
        with_type(w.at[begin].type, [&]<class W>() {
            const W* from = static_cast<const W*>(w.at[begin].at);
            multiply_blocks_of(rows, x, from, end - begin, w.width / W::WIDTH, found + begin * BLOCK, WIDTH);
        });
    }
}
