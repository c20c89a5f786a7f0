// 32 inputs that were rounded, and their products with those of a strip of outputs, where the set has nothing better.
//
// Whole sums are below 2^22. They are added to the bits of 1.5 * 2^23, which as a float are 1.5 * 2^23 plus the sum. One multiply-add takes
// the 1.5 * 2^23 away and multiplies by the inputs' scale: exactly but for one rounding, since scales have 22 bits (stored.hpp).
#pragma once
#include <utility>

constexpr bool SIGNED_NUMBERS = false;
constexpr float NO_SUM = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t NO_SUM_BITS = 0x4b400000;

struct alignas(64) InputSpan {
    int8_t numbers[32];
    float scale, minus, sum;  // minus: -NO_SUM * scale; sum: of the 32 rounded inputs
    int32_t less_8, less_16, less_128, first_less_32, second_less_32;  // what sums begin with: of weights less so much, or of either half
    void put(float by, int32_t first, int32_t second) {
        const int32_t both = first + second;
        scale = by, minus = -NO_SUM * by, sum = by * float(both);
        less_8 = NO_SUM_BITS - 8 * both, less_16 = NO_SUM_BITS - 16 * both, less_128 = NO_SUM_BITS - 128 * both;
        first_less_32 = NO_SUM_BITS - 32 * first, second_less_32 = NO_SUM_BITS - 32 * second;
    }
};
INLINE Bytes signed_low_halves(Bytes b) { return b; }
INLINE Bytes signed_high_halves(Bytes b) { return b; }

// What the whole sum of a group begins with
static const int32_t BARE_SUM = NO_SUM_BITS;
template <class W, int GROUP> INLINE const int32_t& begin(const InputSpan& x) {
    if constexpr (W::GROUPS == 2) return GROUP ? x.second_less_32 : x.first_less_32;
    else if constexpr (W::READ_BITS == 8) return BYTES_BEGIN_LESS ? x.less_128 : BARE_SUM;
    else return W::ZERO == 16 ? x.less_16 : W::ZERO == 8 ? x.less_8 : BARE_SUM;
}
// What the whole sum of a group adds to a row's outputs, and what the offsets add
INLINE void add_sum(Part& to, Part scale, const InputSpan& x, Whole sum) { to += scale * without_bias(sum, x.scale, x.minus); }
INLINE void add_offset(Part& to, Part offset, const InputSpan& x) { to += offset * x.sum; }

#if defined(OUTRIDER_SHORT_SUMS)
#include "short_sums.hpp"
#elif defined(__AVX512VNNI__) && !defined(OUTRIDER_ISA_GENERIC)
#include "vnni.hpp"
#else
// The products of a row's span, group by group; `numbers` are the eight vectors of weights
template <class W, int GROUP, int... v> INLINE Whole sum_of(const InputSpan& x, const Bytes (&numbers)[8], std::integer_sequence<int, v...>) {
    constexpr int FIRST = GROUP * 4;
    Whole sum = whole(begin<W, GROUP>(x));
    if constexpr (W::READ_BITS == 8) (add_bytes<FIRST + v>(sum, numbers[FIRST + v], x.numbers), ...);
    else (add_small<FIRST + v>(sum, numbers[FIRST + v], x.numbers), ...);
    return sum;
}
template <int R, class W> INLINE void add_strip(const InputSpan* x, const W& w, int strip, int span, Part* acc, int apart) {
    Bytes numbers[8];
    w.template two<0>(strip, span, numbers[0], numbers[4]), w.template two<1>(strip, span, numbers[1], numbers[5]);
    w.template two<2>(strip, span, numbers[2], numbers[6]), w.template two<3>(strip, span, numbers[3], numbers[7]);
    const Part scale = w.scale(strip, span, 0), other = W::GROUPS == 2 ? w.scale(strip, span, 1) : scale;
    Part offset = {};
    if constexpr (W::HAS_OFFSETS) offset = w.offset(strip, span);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        Part& to = acc[r * apart];
        add_sum(to, scale, x[r], sum_of<W, 0>(x[r], numbers, std::make_integer_sequence<int, 8 / W::GROUPS>()));
        if constexpr (W::GROUPS == 2) add_sum(to, other, x[r], sum_of<W, 1>(x[r], numbers, std::make_integer_sequence<int, 4>()));
        if constexpr (W::HAS_OFFSETS) add_offset(to, offset, x[r]);
    }
}
#endif
