// y = x W^T for a few rows x and a frozen W, at the speed memory delivers W.
//
// Each output is one chain of additions over the inputs in order, whatever the number of rows: so a row's result does not depend on
// who shares the pass. A few rows and blocks are multiplied together, as many as registers hold sums of: weights are read once for
// all those rows, and again, from a near cache, for the next. The scale of 8-bit weights multiplies the sum.
#pragma once
#include "blocks.hpp"
#include "isa/tiles.hpp"

// R rows times B blocks; results go to sums[row * wide + block * 16].
template <int R, int B> static void multiply(const float* x, int stride, const float* w, int width, float* sums, int wide) {
    V acc[R][B] = {};
    for (int k = 0; k < width; k++) {
        V column[B];
        for (int b = 0; b < B; b++) column[b] = load(w + size_t(b) * width * BLOCK + size_t(k) * BLOCK);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] += x[size_t(r) * stride + k] * column[b];
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(sums + size_t(r) * wide + b * BLOCK, acc[r][b]);
}
template <int R, int B, class W> static void multiply(const float* x, int stride, const W* w, int width, float* sums, int wide) {
    V acc[R][B] = {};
    for (int k = 0; k < width; k += 2) {
        V even[B], odd[B];
        for (int b = 0; b < B; b++) load_pair(w + size_t(b) * width * BLOCK + size_t(k) * BLOCK, even[b], odd[b]);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] += x[size_t(r) * stride + k] * even[b];
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] += x[size_t(r) * stride + k + 1] * odd[b];
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(sums + size_t(r) * wide + b * BLOCK, acc[r][b]);
}

// Blocks that R rows are multiplied with at a time
constexpr int blocks_for(int rows) { return std::max(1, std::min(GROUP, ACCUMULATORS / rows)); }

// R rows times `count` blocks, B at a time
template <int R, int B, class W> static void multiply_some(const float* x, int stride, Blocks<W> w, int count, float* sums, int wide) {
    int b = 0;
    for (; b + B <= count; b += B) multiply<R, B>(x, stride, w.after(b).at, w.width, sums + b * BLOCK, wide);
    if constexpr (B > 1)
        if (b < count) multiply_some<R, B - 1>(x, stride, w.after(b), count - b, sums + b * BLOCK, wide);
}
// At most R rows times `count` blocks, B at a time, or as many as there is room for
template <int R, int B, class W> static void multiply_up_to(int rows, const float* x, int stride, Blocks<W> w, int count, float* sums, int wide) {
    if constexpr (R > 1)
        if (rows < R) return multiply_up_to<R - 1, B>(rows, x, stride, w, count, sums, wide);
    multiply_some<R, B ? B : blocks_for(R)>(x, stride, w, count, sums, wide);
}
// Any number of rows, in groups of about the same size that share a reading of the weights
template <class W> static void multiply_vectors(int rows, const float* x, int stride, Blocks<W> w, int count, float* sums, int wide) {
    if (rows <= MOST_TOGETHER) return multiply_up_to<MOST_TOGETHER, 0>(rows, x, stride, w, count, sums, wide);
    constexpr int AT_ONCE = blocks_for(MOST_TOGETHER);
    const int num_groups = up(rows, MOST_TOGETHER) / MOST_TOGETHER;
    for (int b = 0; b < count; b += AT_ONCE) {
        const Blocks<W> some = w.after(b);
        for (int group = 0; group < num_groups; group++) {
            const int first = rows * group / num_groups, num = rows * (group + 1) / num_groups - first;
            multiply_up_to<MOST_TOGETHER, AT_ONCE>(
                num, x + size_t(first) * stride, stride, some, std::min(AT_ONCE, count - b), sums + size_t(first) * wide + b * BLOCK, wide);
        }
    }
}

// Up to 64 rows; the stride between them matters to vectors only.
template <class T> struct Group {
    const typename Inputs<T>::Stored* at;
    int stride;
};
// Blocks that are best multiplied together.
template <class T> static int together(int rows) { return has_tiles<T> && rows > 16 ? 2 : GROUP; }

// Up to 64 rows of x, a group of them, times `count` blocks of w. With tiles, what is multiplied after them is fetched ahead, and some
// of the chore is done after every 32 inputs if there are more than 32 rows.
template <class T, class W, class C>
static void multiply_group(int rows, Group<T> x, Blocks<W> w, int count, [[maybe_unused]] Blocks<W> then, float* sums, [[maybe_unused]] C& chore) {
    const int wide = together<T>(rows) * BLOCK;
    if constexpr (has_tiles<T>) multiply_tiles(rows, x.at, w, count, then, sums, wide, chore);
    else multiply_vectors(rows, x.at, x.stride, w, count, sums, wide);
}
