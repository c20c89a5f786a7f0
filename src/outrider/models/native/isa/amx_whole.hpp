// Products with stored matrices by AMX tiles of 8 bits: one of up to sixteen rows and a span times the span of sixteen outputs.
//
// Sixteen outputs' numbers of a span lie as a tile wants them: eight vectors [16 outputs][4 inputs]. A span has its own scales, so its
// whole sums leave the tile and are scaled by vectors. Whole sums are exact and are scaled as those of vectors (spans.hpp), so the
// bits are the same.
#pragma once

constexpr int PANEL_ROWS = 16, LEAST_TILE_ROWS = 8;
constexpr int SPAN_BYTES = SPAN * BLOCK;  // of the numbers of sixteen outputs, a byte each

// Tiles 0 and 1 hold sums, 4 a span of rows times 5, its weights; 6 and 7 are half a span each.
static void shape_whole_tiles(int wanted) {
    const int rows = wanted <= PANEL_ROWS / 2 ? PANEL_ROWS / 2 : PANEL_ROWS;
    if (shaped_for == -rows) return;
    shaped_for = -rows;
    TileShape shape;
    const auto set = [&](int tile, int num_rows, int num_bytes) { shape.rows[tile] = uint8_t(num_rows), shape.bytes[tile] = uint16_t(num_bytes); };
    set(0, rows, 64), set(1, rows, 64);
    set(4, rows, SPAN), set(5, SPAN / 4, 64);
    set(6, rows, SPAN / 2), set(7, SPAN / 8, 64);
    written();
    _tile_loadconfig(&shape);
}
// The numbers of a block, a byte each, span after span; null where they lie so
template <class W> static const uint8_t* spread_block(const W* w, int units) {
    if constexpr (W::BITS == 8) return nullptr;
    static thread_local Memory<uint8_t> memory;
    uint8_t *begin = memory.grow(size_t(units) * W::SPANS * SPAN_BYTES), *to = begin;
    for (int unit = 0; unit < units; unit++)
        for (int span = 0; span < W::SPANS; span++, to += SPAN_BYTES)
            [&]<int... v>(std::integer_sequence<int, v...>) {
                const auto put = [&](int at, Bytes low, Bytes high) { _mm512_store_si512(to + at * 64, low), _mm512_store_si512(to + (at + 4) * 64, high); };
                Bytes low, high;
                ((w[unit].template two<v>(0, span, low, high), put(v, low, high)), ...);
            }(std::make_integer_sequence<int, 4>());
    written();
    return begin;
}
// The whole sums of a span, group by group
template <int GROUPS> INLINE void multiply_span(const InputSpan* x, const uint8_t* numbers, int32_t (*sums)[PANEL_ROWS][BLOCK]) {
    _tile_zero(0);
    if constexpr (GROUPS == 1) {
        _tile_loadd(4, x->numbers, sizeof(InputSpan));
        _tile_loadd(5, numbers, 64);
        _tile_dpbsud(0, 4, 5);
    } else {
        _tile_zero(1);
        _tile_loadd(6, x->numbers, sizeof(InputSpan));
        _tile_loadd(7, numbers, 64);
        _tile_dpbsud(0, 6, 7);
        _tile_loadd(6, x->numbers + SPAN / 2, sizeof(InputSpan));
        _tile_loadd(7, numbers + SPAN_BYTES / 2, 64);
        _tile_dpbsud(1, 6, 7);
        _tile_stored(1, sums[1], 64);
    }
    _tile_stored(0, sums[0], 64);
}
// Loops over rows are unrolled, so that sums stay in registers.
template <int R, class W>
INLINE void scale_span(const InputSpan* x, const W& w, int span, const int32_t (*sums)[PANEL_ROWS][BLOCK], Part (&acc)[R]) {
    const auto add = [&]<int group>() {
        const Part scale = w.scale(0, span, group);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) add_sum(acc[r], scale, x[r], (Whole)_mm512_load_si512(sums[group][r]) + whole(begin<W, group>(x[r])));
    };
    add.template operator()<0>();
    if constexpr (W::GROUPS == 2) add.template operator()<1>();
    if constexpr (W::HAS_OFFSETS) {
        const Part offset = w.offset(0, span);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) add_offset(acc[r], offset, x[r]);
    }
}
// R rows of a panel, of which `rows` are wanted, times a block. While tiles multiply a span, vectors scale the sums of the one before.
template <int R, class W>
static void multiply_panel_rows(int rows, const InputSpan* x, const W* w, const uint8_t* numbers, int units, float* found, int wide) {
    alignas(64) int32_t sums[2][W::GROUPS][PANEL_ROWS][BLOCK];
    Part acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = Part{};
    const int num_spans = units * W::SPANS;
    for (int k = 0; k <= num_spans; k++, x += PANEL_ROWS) {
        if (k < num_spans)
            multiply_span<W::GROUPS>(x, numbers ? numbers + size_t(k) * SPAN_BYTES : w[k / W::SPANS].numbers[k % W::SPANS], sums[k % 2]);
        if (k) scale_span<R>(x - PANEL_ROWS, w[(k - 1) / W::SPANS], (k - 1) % W::SPANS, sums[(k - 1) % 2], acc);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        if (r < rows) store(found + size_t(r) * wide, acc[r]);
}
// At most PANEL_ROWS rows of a panel times a block, whose numbers are `spread`
template <class W>
static void multiply_panel_by_tiles(int rows, const InputSpan* x, const W* w, const uint8_t* numbers, int units, float* found, int wide) {
    if (rows <= PANEL_ROWS / 2) multiply_panel_rows<PANEL_ROWS / 2>(rows, x, w, numbers, units, found, wide);
    else multiply_panel_rows<PANEL_ROWS>(rows, x, w, numbers, units, found, wide);
}
