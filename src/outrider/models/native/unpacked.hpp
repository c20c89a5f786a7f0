// Products of quantised weights with inputs that stay floats: scores have the bits of the same weights in float32.
//
// A weight is widened in registers, to the number that dequantising the file gives, and then each output is one chain of additions over
// the inputs in order, as in matmul.hpp. A few rows are multiplied with weights as they are widened. For more rows some blocks are
// written out as floats first.
#pragma once
#include "matmul.hpp"
#include "stored.hpp"

struct Unpacked;  // any type, block by block
template <> struct Blocks<Unpacked> : Blocks<AnyStored> {
    Blocks after(int count) const { return {Blocks<AnyStored>::after(count)}; }
    static Blocks of(const Matrix& w, int first) { return {Blocks<AnyStored>::of(w, first)}; }
};

// The numbers of input j of the four in a vector
template <class W, int j> INLINE Part numbers_of(Bytes four) {
    constexpr int UNUSED = W::TIMES == 16 ? 4 : 0;  // lower bits of a number with a sign
    if constexpr (SIGNED_NUMBERS && (W::IS_SIGNED || W::READ_BITS == 8)) return __builtin_convertvector((Whole)four << (24 - 8 * j) >> (24 + UNUSED), Part);
    else return __builtin_convertvector(((Whole)four >> 8 * j & 255) - W::ZERO, Part);
}
// f(k, weights) for the inputs of half a span, in order: 4 v + j of those from 16 * HALF on
template <class W, int HALF, class F> INLINE void widen_half(const W& w, int strip, int span, F f) {
    const Part scale = w.scale(strip, span, W::GROUPS == 2 ? HALF : 0);
    Part offset = {}, zero = {};
    if constexpr (W::HAS_ZEROS) zero = w.zero(strip);
    else if constexpr (W::HAS_OFFSETS) offset = w.offset(strip, span);
    const auto add = [&]<int v>() {
        Bytes low, high;
        w.template two<v>(strip, span, low, high);
        const auto put = [&]<int j>() {
            const Part numbers = numbers_of<W, j>(HALF ? high : low);
            if constexpr (W::HAS_ZEROS) f(16 * HALF + 4 * v + j, scale * (numbers - zero));
            else if constexpr (W::HAS_OFFSETS) f(16 * HALF + 4 * v + j, scale * numbers + offset);
            else f(16 * HALF + 4 * v + j, scale * numbers);
        };
        put.template operator()<0>(), put.template operator()<1>(), put.template operator()<2>(), put.template operator()<3>();
    };
    add.template operator()<0>(), add.template operator()<1>(), add.template operator()<2>(), add.template operator()<3>();
}
// R rows times N strips, the first of which is `first`
template <int R, int N, class W> static void multiply_widened(Some of, const W* w, int units, int first) {
    Part acc[R][N] = {};
    const W* at[N];
    for (int n = 0; n < N; n++) at[n] = w + size_t((first + n) / STRIPS) * units;
    const auto half = [&]<int HALF>(int unit, int span) {
        const int begin = unit * W::WIDTH + span * SPAN;
        Part wide[N][16];
        for (int n = 0; n < N; n++) widen_half<W, HALF>(at[n][unit], (first + n) % STRIPS, span, [&](int k, Part one) { wide[n][k % 16] = one; });
        for (int k = 0; k < 16; k++)
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++) acc[r][n] += of.input(r, begin + 16 * HALF + k) * wide[n][k];
    };
    for (int unit = 0; unit < units; unit++)
        for (int span = 0; span < W::SPANS; span++) half.template operator()<0>(unit, span), half.template operator()<1>(unit, span);
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) memcpy(of.sums + size_t(r) * of.wide + (first + n) * STRIP, &acc[r][n], sizeof(Part));
}
template <int R, class W> static void multiply_widened_up_to(int rows, Some of, const W* w, int count, int units) {
    if constexpr (R > 1)
        if (rows < R) return multiply_widened_up_to<R - 1>(rows, of, w, count, units);
    constexpr int N = R == 1 ? 4 : R == 2 ? 2 : 1;
    int strip = 0;
    for (; strip + N <= count * STRIPS; strip += N) multiply_widened<R, N>(of, w, units, strip);
    for (; strip < count * STRIPS; strip++) multiply_widened<R, 1>(of, w, units, strip);
}
// Some blocks as floats, in memory of this thread
template <class W> static Blocks<float> written_out(const W* w, int count, int units) {
    static thread_local Memory<float> memory;
    const Blocks<float> found{memory.grow(size_t(units) * W::WIDTH * BLOCK * count), units * W::WIDTH};
    for (int b = 0; b < count; b++)
        for (int unit = 0; unit < units; unit++)
            for (int span = 0; span < W::SPANS; span++)
                for (int strip = 0; strip < STRIPS; strip++) {
                    float* to = memory.data() + found.next() * b + size_t(unit * W::WIDTH + span * SPAN) * BLOCK + strip * STRIP;
                    const auto put = [&](int k, Part one) { memcpy(to + k * BLOCK, &one, sizeof one); };
                    const W& from = w[size_t(b) * units + unit];
                    widen_half<W, 0>(from, strip, span, put), widen_half<W, 1>(from, strip, span, put);
                }
    return found;
}
// Up to 64 rows times `count` blocks
template <class C>
static void multiply_group(int rows, Group<float> x, Blocks<Unpacked> w, int count, Blocks<Unpacked>, float* sums, C&) {
    constexpr int WIDTH = GROUP * BLOCK, FEW = 4, AT_ONCE = 2;  // so many blocks as floats stay near
    for (int b = 0, num; b < count; b += num) {
        const Place* places = w.at + b;
        for (num = 1; b + num < count && places[num].type == places->type; num++);
        with_type(places->type, [&]<class W>() {
            const W* from = static_cast<const W*>(places->at);
            const int units = w.width / W::WIDTH;
            if (rows <= FEW) return multiply_widened_up_to<FEW>(rows, {x.at, x.stride, sums + b * BLOCK, WIDTH}, from, num, units);
            for (int i = 0; i < num; i += AT_ONCE) {
                const int some = std::min(AT_ONCE, num - i);
                const Blocks<float> wide = written_out(from + size_t(i) * units, some, units);
                multiply_vectors(rows, {x.at, x.stride, sums + (b + i) * BLOCK, WIDTH}, wide, some, wide);
            }
        });
    }
}
