// Products with stored matrices by AMX tiles of 8 bits: one of up to sixteen rows and a span times the span of sixteen outputs.
//
// Sixteen outputs' numbers of a span lie as a tile wants them: eight vectors [16 outputs][4 inputs]. A span has its own scales, so its
// whole sums leave the tile and are scaled by vectors. Whole sums are exact and are scaled as those of vectors (spans.hpp), so the
// bits are the same.
#pragma once

constexpr int PANEL_ROWS = 16, LEAST_TILE_ROWS = 4;
constexpr int SPAN_BYTES = SPAN * BLOCK;  // of the numbers of sixteen outputs, a byte each
constexpr int SPANS_AT_ONCE = 24;         // of sixteen rows: they fill half of the first-level cache
template <class W> constexpr bool IS_WRITTEN = W::BITS < 8;  // out, with its sign, before it is multiplied

// Rows of a tile that are multiplied where so many are wanted
static int panel_for(int wanted) { return wanted <= PANEL_ROWS / 4 ? PANEL_ROWS / 4 : wanted <= PANEL_ROWS / 2 ? PANEL_ROWS / 2 : PANEL_ROWS; }

// Tiles 0 and 1 hold sums, 4 a span of rows times 5, its weights; 6 and 7 are half a span each.
static void shape_whole_tiles(int wanted) {
    const int rows = panel_for(wanted);
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
// The numbers of some units of a block with their sign, a byte each, span after span
template <class W> static void write_numbers(const W* w, int units, int8_t* to) {
    const auto put = [&](int at, Bytes some) { _mm512_store_si512(to + at * 64, W::ZERO ? _mm512_sub_epi8(some, _mm512_set1_epi8(W::ZERO)) : some); };
    for (const W* const end = w + units; w < end; w++)
        for (int span = 0; span < W::SPANS; span++, to += SPAN_BYTES)
            [&]<int... v>(std::integer_sequence<int, v...>) {
                Bytes low, high;
                ((w->template two<v>(0, span, low, high), put(v, low), put(v + 4, high)), ...);
            }(std::make_integer_sequence<int, 4>());
    written();
}
// The whole sums of a span, group by group. Bytes that stand for 128 less are multiplied as they lie.
template <class W> INLINE void multiply_span(const InputSpan* x, const void* numbers, int32_t (*sums)[PANEL_ROWS][BLOCK]) {
    _tile_zero(0);
    if constexpr (W::GROUPS == 1) {
        _tile_loadd(4, x->numbers, sizeof(InputSpan));
        _tile_loadd(5, numbers, 64);
        if constexpr (IS_WRITTEN<W>) _tile_dpbssd(0, 4, 5);
        else _tile_dpbsud(0, 4, 5);
    } else {
        static_assert(IS_WRITTEN<W>);
        _tile_zero(1);
        _tile_loadd(6, x->numbers, sizeof(InputSpan));
        _tile_loadd(7, numbers, 64);
        _tile_dpbssd(0, 6, 7);
        _tile_loadd(6, x->numbers + SPAN / 2, sizeof(InputSpan));
        _tile_loadd(7, static_cast<const int8_t*>(numbers) + SPAN_BYTES / 2, 64);
        _tile_dpbssd(1, 6, 7);
        _tile_stored(1, sums[1], 64);
    }
    _tile_stored(0, sums[0], 64);
}
// What a row's whole sum adds. A whole number below 2^22 is a float, so its product with the scale is rounded once, as that of `add_sum`.
template <class W> INLINE void add_tile_sum(Part& to, Part scale, const InputSpan& x, const int32_t* sum) {
    const __m512i whole_sum = _mm512_load_si512(sum);
    if constexpr (IS_WRITTEN<W>) to += scale * ((Part)_mm512_cvtepi32_ps(whole_sum) * x.scale);
    else add_sum(to, scale, x, (Whole)whole_sum + whole(begin<W, 0>(x)));
}
// Loops over rows are unrolled, so that sums stay in registers.
template <int R, class W>
INLINE void scale_span(const InputSpan* x, const W& w, int span, const int32_t (*sums)[PANEL_ROWS][BLOCK], Part (&acc)[R]) {
    for (int group = 0; group < W::GROUPS; group++) {
        const Part scale = w.scale(0, span, group);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) add_tile_sum<W>(acc[r], scale, x[r], sums[group][r]);
    }
    if constexpr (W::HAS_OFFSETS) {
        const Part offset = w.offset(0, span);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) add_offset(acc[r], offset, x[r]);
    }
}
// R rows of a panel, of which `rows` are wanted, times some units of a block, added to what was found before them unless they are the first.
// While tiles multiply a span, vectors scale the sums of the one before, and some lines of what is multiplied next come from memory.
template <int R, class W>
static void multiply_panel_rows(int rows, const InputSpan* x, const W* w, int units, const int8_t* numbers, bool begins, float* found, int wide,
                                Ahead& next, int lines) {
    alignas(64) int32_t sums[2][W::GROUPS][PANEL_ROWS][BLOCK];
    Part acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = !begins && r < rows ? load(found + size_t(r) * wide) : Part{};
    const int num_spans = units * W::SPANS;
    for (int k = 0; k <= num_spans; k++, x += PANEL_ROWS) {
        const void* at = w[k / W::SPANS].numbers[k % W::SPANS];
        if constexpr (IS_WRITTEN<W>) at = numbers + size_t(k) * SPAN_BYTES;
        if (k < num_spans) multiply_span<W>(x, at, sums[k % 2]);
        for (int line = 0; line < lines; line++) next.bring_one();
        if (k) scale_span<R>(x - PANEL_ROWS, w[(k - 1) / W::SPANS], (k - 1) % W::SPANS, sums[(k - 1) % 2], acc);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        if (r < rows) store(found + size_t(r) * wide, acc[r]);
}
// All rows times `count` blocks of a type. Some inputs of all rows are multiplied with every block in turn. Meanwhile the weights that are
// multiplied next come into the second-level cache; `then` are those after all of these.
template <class W>
static void multiply_by_tiles(int rows, Spans<InputSpan, PANEL_ROWS> x, const W* w, int count, int units, const W* then, float* found, int wide) {
    const int most = SPANS_AT_ONCE / W::SPANS, parts = up(units, most) / most, at_once = up(units, parts) / parts;
    alignas(64) int8_t numbers[IS_WRITTEN<W> ? SPANS_AT_ONCE * SPAN_BYTES : 1];
    shape_whole_tiles(rows);
    for (int first = 0; first < units; first += at_once) {
        const int end = std::min(units, first + at_once), steps = (end - first) * W::SPANS * up(rows, PANEL_ROWS) / PANEL_ROWS;
        const int lines = up(int(sizeof(W)) * at_once / 64, steps) / steps;
        for (int b = 0; b < count; b++) {
            const W *block = w + size_t(b) * units + first, *later = b + 1 < count ? block + units : end < units ? w + end : then;
            Ahead next = Ahead::of(later, later ? at_once : 0);
            if constexpr (IS_WRITTEN<W>) write_numbers(block, end - first, numbers);
            for (int row = 0; row < rows; row += PANEL_ROWS) {
                const auto multiply = [&]<int R>() {
                    float* to = found + size_t(row) * wide + b * BLOCK;
                    const InputSpan* from = x.from(row).at(first * W::SPANS);
                    multiply_panel_rows<R>(std::min(rows - row, R), from, block, end - first, numbers, !first, to, wide, next, lines);
                };
                switch (panel_for(rows)) {
                    case PANEL_ROWS / 4: multiply.template operator()<PANEL_ROWS / 4>(); break;
                    case PANEL_ROWS / 2: multiply.template operator()<PANEL_ROWS / 2>(); break;
                    default: multiply.template operator()<PANEL_ROWS>();
                }
            }
        }
    }
}
