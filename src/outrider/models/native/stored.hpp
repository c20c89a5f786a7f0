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
static_assert(MOST_ROWS % PANEL_ROWS == 0, "rows are multiplied MOST_ROWS at a time, from the first of a panel");
typedef Spans<InputSpan, PANEL_ROWS> Rounded;
typedef SpanRows<InputSpan, PANEL_ROWS> RoundedRows;

static inline float short_scale(float scale) {  // no smaller, with 22 bits: three times as much is a float too
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 3) & ~3u;
    memcpy(&scale, &bits, 4);
    return scale;
}
// Sixteen spans' scales first, so that none waits for the divisions of the one before
static inline void round_spans(const float* x, int count, InputSpan* to, int apart) {
    float scales[LANES], inverses[LANES];
    for (int k = 0; k < count; k += LANES, x += LANES * SPAN) {
        const int some = std::min(LANES, count - k);
        for (int i = 0; i < some; i++) scales[i] = largest_of_span(x + i * SPAN);
        for (int i = 0; i < some; i++) {
            scales[i] = short_scale(scales[i] / 127.0f);
            inverses[i] = scales[i] > 1e-37f ? 1.0f / scales[i] : 0.0f;  // all but zero counts as zero
        }
        for (int i = 0; i < some; i++) {
            InputSpan& span = to[size_t(k + i) * apart];
            const float* from = x + i * SPAN;
            const int32_t first = round_to_bytes(load(from) * inverses[i], span.numbers);
            span.put(scales[i], first, round_to_bytes(load(from + LANES) * inverses[i], span.numbers + LANES));
        }
    }
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
    constexpr bool WAITS = N < STRIPS || (R == WHOLE_ROWS && !SPREADS);  // long enough at these weights for the next to come from memory
    constexpr int SHARE = WAITS ? sizeof(W) * N / STRIPS : 0;  // of the next block, brought near by every pass over this one
    const char* later = reinterpret_cast<const char*>(w + units) + size_t(strip / N) * units * SHARE;
    for (int unit = begin; unit < end; unit++) {
        for (int line = 0; line < SHARE; line += 64) __builtin_prefetch(later + size_t(unit) * SHARE + line, 0, 3);
        for (int span = 0; span < W::SPANS; span++, at += PANEL_ROWS) add_strips<R, N>(at, w + unit, size_t(units), strip, span, acc);
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
// R rows or fewer times N blocks that were written out, for `spans` spans
template <int R, int N, class W>
static void multiply_written(int rows, const InputSpan* x, const SpreadSpan<W>* w, int spans, bool begins, float* found, int wide, const char* later) {
    constexpr int SHARE = int(sizeof(W)) * N / W::SPANS;  // of what is written out next, brought near meanwhile
    Part acc[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = begins || r >= rows ? Part{} : part(found + size_t(r) * wide + n * STRIP);
    for (int span = 0; span < spans; span++, x += PANEL_ROWS) {
        for (int line = 0; later && line < SHARE; line += 64) __builtin_prefetch(later + size_t(span) * SHARE + line, 0, 2);
        add_spread<R, N>(x, w + span, size_t(spans), acc);
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N && r < rows; n++) {
            const Part one = acc[r][n];
            memcpy(found + size_t(r) * wide + n * STRIP, &one, sizeof one);
        }
}
// Any number of rows times N blocks, units [begin, end): the weights are written out once for all
template <int N, class W>
static void multiply_spread(int rows, Rounded x, const W* w, int units, int begin, int end, float* found, int wide) {
    static thread_local Memory<SpreadSpan<W>> memory;
    const int spans = (end - begin) * W::SPANS;
    SpreadSpan<W>* written = memory.grow(size_t(spans) * N);
    for (int n = 0; n < N; n++)
        for (int unit = begin; unit < end; unit++)
            for (int span = 0; span < W::SPANS; span++) written[(n * (end - begin) + unit - begin) * W::SPANS + span].put(w[size_t(n) * units + unit], span);
    for (int row = 0; row < rows; row += WHOLE_ROWS) {
        const char* later = row ? nullptr : reinterpret_cast<const char*>(w + size_t(N) * units + begin);
        const InputSpan* at = x.from(row).at(begin * W::SPANS);
        const auto multiply = [&]<int R>() { multiply_written<R, N, W>(rows - row, at, written, spans, begin == 0, found + size_t(row) * wide, wide, later); };
        rows - row <= WHOLE_ROWS - 2 ? multiply.template operator()<std::max(1, WHOLE_ROWS - 2)>() : multiply.template operator()<WHOLE_ROWS>();
    }
}
template <class W> static void multiply_spread_rows(int rows, Rounded x, const W* w, int count, int units, float* found, int wide) {
    constexpr int AT_ONCE = 256 / W::WIDTH;  // so many inputs of a few rows and of two blocks, a byte each, fill half of the first-level cache
    for (int begin = 0; begin < units; begin += AT_ONCE)
        for (int b = 0; b < count; b += 2) {
            const int end = std::min(units, begin + AT_ONCE);
            if (b + 1 < count) multiply_spread<2>(rows, x, w + size_t(b) * units, units, begin, end, found + b * BLOCK, wide);
            else multiply_spread<1>(rows, x, w + size_t(b) * units, units, begin, end, found + b * BLOCK, wide);
        }
}
// At most R rows of a panel: all of R where one is missing (what is found for it is not used), or half of them, then the rest
template <int R, class W> static void multiply_stored_up_to(int rows, Rounded x, const W* w, int count, int units, float* found, int wide) {
    if constexpr (R > 1 && SPREADS) {
        if (rows < R) return multiply_stored_up_to<R - 1>(rows, x, w, count, units, found, wide);
    } else if constexpr (R > 1)
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
    static Blocks of(const Matrix& w, int first) { return {w.has_places() ? static_cast<const Place*>(w.packed) + first : nullptr, w.in}; }
};
template <class W> constexpr bool is_stored = std::is_same_v<W, AnyStored>;

// All rows times `count` blocks of a type. Tiles fetch what lies at `then` meanwhile.
template <class W> static void multiply_blocks_of(int rows, Rounded x, const W* w, int count, int units, const W* then, float* found, int wide) {
    if (rows >= LEAST_TILE_ROWS) return multiply_by_tiles(rows, x, w, count, units, then, found, wide);
    if constexpr (SPREADS && PANEL_ROWS == WHOLE_ROWS)
        if (rows > 4 * WHOLE_ROWS) return multiply_spread_rows(rows, x, w, count, units, found, wide);
    for (int row = 0; row < rows; row += WHOLE_ROWS)
        multiply_stored_up_to<WHOLE_ROWS>(std::min(rows - row, WHOLE_ROWS), x.from(row), w, count, units, found + size_t(row) * wide, wide);
}
// Up to 64 rows times `count` blocks
template <class C>
static void multiply_group(int rows, Rounded x, Blocks<AnyStored> w, int count, Blocks<AnyStored> then, float* found, C&) {
    constexpr int WIDTH = GROUP * BLOCK;
    const void* next = then.at ? then.at->at : nullptr;
    for (int begin = 0, end = 0; begin < count; begin = end) {
        while (end < count && w.at[end].type == w.at[begin].type) end++;
        with_type(w.at[begin].type, [&]<class W>() {
            const W* from = static_cast<const W*>(w.at[begin].at);
            multiply_blocks_of(rows, x, from, end - begin, w.width / W::WIDTH, static_cast<const W*>(next), found + begin * BLOCK, WIDTH);
        });
    }
}
