// Products of whole numbers by VNNI: an instruction multiplies four inputs with four weights of sixteen outputs, and adds all to a sum.
//
// A few rows and blocks are multiplied together: an input that was spread over a register serves all blocks, and weights serve all rows.
// For more rows than that, the weights of two blocks are written out as bytes once, and their scales as floats.
#pragma once

constexpr bool SPREADS = true;

INLINE Whole spread(const int8_t* inputs, int v) { return (Whole)_mm512_set1_epi32(four_at(inputs, v)); }
INLINE void add_products(Whole& sum, Bytes w, Whole inputs) { sum = (Whole)_mm512_dpbusd_epi32((__m512i)sum, w, (__m512i)inputs); }

// A span of a block, written out
template <class W> struct alignas(64) SpreadSpan {
    uint8_t numbers[8][64];
    float scales[W::GROUPS][LANES], offset[W::HAS_OFFSETS ? LANES : 0];
    void put(const W& w, int span) {
        [&]<int... v>(std::integer_sequence<int, v...>) {
            const auto put = [&](int at, Bytes low, Bytes high) { _mm512_store_si512(numbers[at], low), _mm512_store_si512(numbers[at + 4], high); };
            Bytes low, high;
            ((w.template two<v>(0, span, low, high), put(v, low, high)), ...);
        }(std::make_integer_sequence<int, 4>());
        for (int group = 0; group < W::GROUPS; group++) store(scales[group], w.scale(0, span, group));
        if constexpr (W::HAS_OFFSETS) store(offset, w.offset(0, span));
    }
};
// What begins the sums of a group: one for each row
template <class W, int GROUP, int R, int N> INLINE void begin_all(const InputSpan* x, Whole (&sums)[R][N]) {
    for (int r = 0; r < R; r++) {
        const Whole first = whole(begin<W, GROUP>(x[r]));
        for (int n = 0; n < N; n++) sums[r][n] = first;
    }
}
// What the whole sums of a group add to outputs, and what the offsets add
template <int R, int N> INLINE void add_sums(const InputSpan* x, const Part (&scales)[N], const Whole (&sums)[R][N], Part (*acc)[N]) {
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) add_sum(acc[r][n], scales[n], x[r], sums[r][n]);
}
template <int R, int N> INLINE void add_offsets(const InputSpan* x, const Part (&offsets)[N], Part (*acc)[N]) {
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) add_offset(acc[r][n], offsets[n], x[r]);
}
// A span of R rows times that of N blocks, which were written out `apart` from each other
template <int R, int N, class W> INLINE void add_spread(const InputSpan* x, const SpreadSpan<W>* w, size_t apart, Part (*acc)[N]) {
    constexpr int EACH = 8 / W::GROUPS;
    const auto add = [&]<int group>() {
        Whole sums[R][N];
        Part scales[N];
        begin_all<W, group>(x, sums);
#pragma GCC unroll 8
        for (int v = group * EACH; v < (group + 1) * EACH; v++) {
            Bytes some[N];
            for (int n = 0; n < N; n++) some[n] = load_bytes(w[n * apart].numbers[v]);
            for (int r = 0; r < R; r++) {
                const Whole inputs = spread(x[r].numbers, v);
                for (int n = 0; n < N; n++) add_products(sums[r][n], some[n], inputs);
            }
        }
        for (int n = 0; n < N; n++) scales[n] = load(w[n * apart].scales[group]);
        add_sums<R, N>(x, scales, sums, acc);
    };
    add.template operator()<0>();
    if constexpr (W::GROUPS == 2) add.template operator()<1>();
    if constexpr (W::HAS_OFFSETS) {
        Part offsets[N];
        for (int n = 0; n < N; n++) offsets[n] = load(w[n * apart].offset);
        add_offsets<R, N>(x, offsets, acc);
    }
}
// A span of R rows times that of N blocks as they are packed
template <int R, int N, class W> INLINE void add_strips(const InputSpan* x, const W* w, size_t apart, int, int span, Part (*acc)[N]) {
    Whole sums[W::GROUPS][R][N];
    Part scales[W::GROUPS][N], offsets[N];
    begin_all<W, 0>(x, sums[0]);
    if constexpr (W::GROUPS == 2) begin_all<W, 1>(x, sums[1]);
    const auto add = [&]<int v>() {
        Bytes low[N], high[N];
        for (int n = 0; n < N; n++) w[n * apart].template two<v>(0, span, low[n], high[n]);
        for (int r = 0; r < R; r++) {
            const Whole first = spread(x[r].numbers, v), second = spread(x[r].numbers, v + 4);
            for (int n = 0; n < N; n++) add_products(sums[0][r][n], low[n], first), add_products(sums[W::GROUPS - 1][r][n], high[n], second);
        }
    };
    [&]<int... v>(std::integer_sequence<int, v...>) { (add.template operator()<v>(), ...); }(std::make_integer_sequence<int, 4>());
    for (int group = 0; group < W::GROUPS; group++) {
        for (int n = 0; n < N; n++) scales[group][n] = w[n * apart].scale(0, span, group);
        add_sums<R, N>(x, scales[group], sums[group], acc);
    }
    if constexpr (W::HAS_OFFSETS) {
        for (int n = 0; n < N; n++) offsets[n] = w[n * apart].offset(0, span);
        add_offsets<R, N>(x, offsets, acc);
    }
}
