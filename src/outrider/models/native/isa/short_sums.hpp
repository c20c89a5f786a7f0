// Products of whole numbers on x86 without VNNI: an instruction multiplies bytes and adds pairs of products in 16 bits, another adds pairs
// of those in 32. Several of the first go before one of the second, as many as fit into 16 bits.
//
// An input is at most 127. So 8 pairs with weights of 4 bits are at most 30,480, 4 of 5 bits 31,496, 2 of 6 bits 32,004. Weights of 8 bits
// are read with their sign. It is moved to the inputs, since the instruction's other factor has none: one pair is at most 32,512.
#pragma once

template <int BITS> constexpr int PAIRS_THAT_FIT = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;

template <class W> INLINE auto factor(Bytes w) {
    if constexpr (W::READ_BITS == 8) return less_128(w);
    else return w;
}
// The products of a span, group by group
template <int R, class W> INLINE void add_span(const InputSpan* x, const W& w, int strip, int span, Whole (&sums)[R][W::GROUPS]) {
    constexpr int AT_ONCE = PAIRS_THAT_FIT<W::READ_BITS> / (W::GROUPS == 1 ? 2 : 1);  // vectors v and v + 4 whose products fit; 0: v alone
    Shorts found[R][W::GROUPS];
    const auto add = [&]<int v>() {
        Bytes low, high;
        w.template two<v>(strip, span, low, high);
        const auto first = factor<W>(low), second = factor<W>(high);
        for (int r = 0; r < R; r++) {
            const Shorts a = products(first, four_at(x[r].numbers, v)), b = products(second, four_at(x[r].numbers, v + 4));
            if constexpr (AT_ONCE == 0) {
                sums[r][0] += whole(a) + whole(b);
                continue;
            }
            constexpr bool BEGINS = v % std::max(AT_ONCE, 1) == 0, ENDS = (v + 1) % std::max(AT_ONCE, 1) == 0;
            if constexpr (W::GROUPS == 1) {
                found[r][0] = BEGINS ? plus(a, b) : plus(found[r][0], plus(a, b));
            } else {
                found[r][0] = BEGINS ? a : plus(found[r][0], a), found[r][1] = BEGINS ? b : plus(found[r][1], b);
            }
            if constexpr (ENDS)
                for (int group = 0; group < W::GROUPS; group++) sums[r][group] += whole(found[r][group]);
        }
    };
    [&]<int... v>(std::integer_sequence<int, v...>) {
        (add.template operator()<v>(), ...);
    }(std::make_integer_sequence<int, 4>());
}

template <int R, class W> INLINE void add_strip(const InputSpan* x, const W& w, int strip, int span, Part* acc, int apart) {
    Whole sums[R][W::GROUPS];
    for (int r = 0; r < R; r++) {
        sums[r][0] = whole(begin<W, 0>(x[r]));
        if constexpr (W::GROUPS == 2) sums[r][1] = whole(begin<W, 1>(x[r]));
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
