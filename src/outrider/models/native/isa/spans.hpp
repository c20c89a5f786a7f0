// 32 inputs that were rounded, and their products with those of a strip of outputs, where the set has nothing better.
#pragma once
#include <utility>

constexpr bool SIGNED_NUMBERS = false;
struct InputSpan {
    int8_t numbers[32];
    float scale, sum;  // sum: of the 32 rounded inputs
    int32_t whole[2];  // sums of 16 / scale
    void put(float by, int32_t first, int32_t second) { scale = by, sum = by * float(first + second), whole[0] = first, whole[1] = second; }
};
INLINE Bytes signed_low_halves(Bytes b) { return b; }
INLINE Bytes signed_high_halves(Bytes b) { return b; }

#if defined(OUTRIDER_SHORT_SUMS)
#include "short_sums.hpp"
#else
// What a sum of products with weights less ZERO begins with
template <class W> INLINE Whole begin(int32_t inputs) {
    if constexpr (W::BITS == 8) return begin_bytes(inputs);
    else return whole(-W::ZERO * inputs);
}
// R rows times the vectors v and v + 4 of a span
template <int R, int v, class W> INLINE void add_two(const InputSpan* x, const W& w, int strip, int span, Whole (&sums)[R][W::GROUPS]) {
    Bytes low, high;
    w.template two<v>(strip, span, low, high);
    for (int r = 0; r < R; r++) {
        Whole &first = sums[r][0], &second = sums[r][W::GROUPS - 1];
        if constexpr (W::BITS == 8) add_bytes<v>(first, low, x[r].numbers), add_bytes<v + 4>(second, high, x[r].numbers);
        else add_small<v>(first, low, x[r].numbers), add_small<v + 4>(second, high, x[r].numbers);
    }
}
// The products of a span, group by group
template <int R, class W> INLINE void add_span(const InputSpan* x, const W& w, int strip, int span, Whole (&sums)[R][W::GROUPS]) {
    [&]<int... v>(std::integer_sequence<int, v...>) {
        (add_two<R, v>(x, w, strip, span, sums), ...);
    }(std::make_integer_sequence<int, 4>());
}
#endif
// What the whole sum of a group adds to a row's outputs, and what the offsets add
INLINE void add_sum(Part& to, Part scale, const InputSpan& x, Whole sum) { to += (scale * x.scale) * floats(sum); }
INLINE void add_offset(Part& to, Part offset, const InputSpan& x) { to += offset * x.sum; }

template <int R, class W> INLINE void add_strip(const InputSpan* x, const W& w, int strip, int span, Part* acc, int apart) {
    Whole sums[R][W::GROUPS];
    for (int r = 0; r < R; r++) {
        if constexpr (W::GROUPS == 1) sums[r][0] = begin<W>(x[r].whole[0] + x[r].whole[1]);
        else sums[r][0] = begin<W>(x[r].whole[0]), sums[r][1] = begin<W>(x[r].whole[1]);
    }
    add_span<R>(x, w, strip, span, sums);
    for (int group = 0; group < W::GROUPS; group++) {
        const Part scale = w.scale(strip, span, group);
        for (int r = 0; r < R; r++) add_sum(acc[r * apart], scale, x[r], sums[r][group]);
    }
    if constexpr (W::HAS_OFFSETS) {
        const Part offset = w.offset(strip, span);
        for (int r = 0; r < R; r++) add_offset(acc[r * apart], offset, x[r]);
    }
}
