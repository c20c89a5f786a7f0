// y = x W^T for a few rows x and a frozen W, at the speed memory delivers W.
//
// Each output is one chain of additions over the inputs in order, whatever the number of rows: so a row's result does not depend on
// who shares the pass. A few rows and blocks are multiplied together, as many as registers hold sums of: weights are read once for
// all those rows, and again, from a near cache, for the next. The scale of 8-bit weights multiplies the sum.
#pragma once
#include "blocks.hpp"
#include "isa/brain.hpp"
#include "isa/dot.hpp"
#include "isa/tiles.hpp"

// Rows that are multiplied together, and where what is found goes: sums[row * wide + block * 16]
struct Some {
    const float* x;
    int stride;
    float* sums;
    int wide;
    float input(int row, int k) const { return x[size_t(row) * stride + k]; }
    Some from(int row, int block) const { return {x + size_t(row) * stride, stride, sums + size_t(row) * wide + block * BLOCK, wide}; }
};

// R rows times B blocks
template <int R, int B> static void multiply(Some of, Blocks<float> w, Later later) {
    V acc[R][B] = {};
    for (int k = 0; k < w.width; k++) {
        V column[B];
        later.bring(k);
        for (int b = 0; b < B; b++) column[b] = load(w.after(b).at + size_t(k) * BLOCK);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] += of.input(r, k) * column[b];
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(of.from(r, b).sums, acc[r][b]);
}
template <int R, int B, class W> static void multiply(Some of, Blocks<W> w, Later later) {
    V acc[R][B] = {};
    for (int k = 0; k < w.width; k += 2) {
        V even[B], odd[B];
        later.bring(k);
        for (int b = 0; b < B; b++) load_pair(w.after(b).at + size_t(k) * BLOCK, even[b], odd[b]);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] += of.input(r, k) * LIFT<W> * even[b];
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] += of.input(r, k + 1) * LIFT<W> * odd[b];
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(of.from(r, b).sums, acc[r][b] * LIFT<W>);
}
// The same in pairs of inputs
template <int R, int B> static void multiply(Some of, Blocks<BrainDots> w, Later later) {
    V acc[R][B] = {};
    for (int k = 0; k < w.width; k += 4) {
        const auto inputs = [&]<int... r>(std::integer_sequence<int, r...>) {
            return std::array<FourInputs, R>{FourInputs(of.x + size_t(r) * of.stride + k)...};
        }(std::make_integer_sequence<int, R>());
        later.bring(k), later.bring(k + 1), later.bring(k + 2), later.bring(k + 3);
        add_pair<0, R, B>(acc, inputs, [&](int b) { return w.after(b).at + size_t(k) * BLOCK; });
        add_pair<1, R, B>(acc, inputs, [&](int b) { return w.after(b).at + size_t(k + 2) * BLOCK; });
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(of.from(r, b).sums, acc[r][b]);
}

// Blocks that R rows are multiplied with at a time
constexpr int blocks_for(int rows) { return std::max(1, std::min(GROUP, ACCUMULATORS / rows)); }

// R rows times `count` blocks, B at a time
template <int R, int B, class W> static void multiply_some(Some of, Blocks<W> w, int count, Later later) {
    int b = 0;
    if constexpr (HAS_PANELS && R == MOST_TOGETHER && std::is_same_v<W, float>) {
        for (; b < count; b++) {
            const Some one = of.from(0, b);
            for (int r = 0; r < R; r++) memset(one.from(r, 0).sums, 0, BLOCK * sizeof(float));
            const Some second = one.from(1, 0), third = one.from(2, 0), last = one.from(3, 0);
            multiply_panel({one.x, second.x, third.x, last.x}, w.after(b).at, BLOCK, w.width, {one.sums, second.sums, third.sums, last.sums}, later);
        }
        return;
    }
    for (; b + B <= count; b += B) multiply<R, B>(of.from(0, b), w.after(b), later);
    if constexpr (B > 1)
        if (b < count) multiply_some<R, B - 1>(of.from(0, b), w.after(b), count - b, later);
}
// At most R rows times `count` blocks, B at a time, or as many as there is room for
template <int R, int B, class W> static void multiply_up_to(int rows, Some of, Blocks<W> w, int count, Later later) {
    if constexpr (R > 1)
        if (rows < R) return multiply_up_to<R - 1, B>(rows, of, w, count, later);
    multiply_some<R, B ? B : blocks_for(R)>(of, w, count, later);
}
// A multiple of MANY_ROWS. Few blocks for many rows: weights come from the second-level cache for every group of rows.
template <class W> static void multiply_many(int rows, Some of, Blocks<W> w, int count, Blocks<W> then) {
    const int num_groups = rows / std::max(1, MANY_ROWS), step = MANY_BLOCKS * BLOCK * int(sizeof(W)) / num_groups;
    for (int b = 0; b < count; b += MANY_BLOCKS) {
        const char* next = reinterpret_cast<const char*>(b + MANY_BLOCKS < count ? w.after(b + MANY_BLOCKS).at : then.at);
        for (int group = 0; group < num_groups; group++) {
            const Later later{next + size_t(group) * w.width * step, step};
            multiply_some<MANY_ROWS, MANY_BLOCKS>(of.from(group * MANY_ROWS, b), w.after(b), std::min(MANY_BLOCKS, count - b), later);
        }
    }
}
// Some blocks as floats, in memory of this thread
template <class W> static Blocks<float> widened(Blocks<W> w, int count) {
    static thread_local Memory<float> memory;
    const Blocks<float> found{memory.grow(w.next() * count), w.width};
    float* to = memory.data();
    for (size_t i = 0; i < w.next() * count; i += 2 * BLOCK) {
        V even, odd;
        load_pair(w.at + i, even, odd);
        store(to + i, even * (LIFT<W> * LIFT<W>)), store(to + i + BLOCK, odd * (LIFT<W> * LIFT<W>));
    }
    return found;
}
template <class W> constexpr bool WIDENS = WIDENS_FIRST && !std::is_same_v<W, float> && !std::is_same_v<W, BrainDots>;

// Any number of rows times at most B blocks; all of `later` is brought meanwhile.
template <int B, class W> static void multiply_shared(int rows, Some of, Blocks<W> w, int count, Later later) {
    const int num_groups = up(rows, MOST_TOGETHER) / MOST_TOGETHER, step = later.step / num_groups;
    for (int group = 0; group < num_groups; group++) {
        const int first = HAS_PANELS ? group * MOST_TOGETHER : rows * group / num_groups;
        const int num = HAS_PANELS ? std::min(MOST_TOGETHER, rows - first) : rows * (group + 1) / num_groups - first;
        multiply_up_to<MOST_TOGETHER, B>(num, of.from(first, 0), w, count, {later.at + size_t(group) * w.width * step, step});
    }
}
// Any number of rows, in groups of about the same size that share a reading of the weights. The next weights come from memory while
// these are multiplied: the first group would wait for them, and the others read what is near.
template <class W> static void multiply_vectors(int rows, Some of, Blocks<W> w, int count, Blocks<W> then) {
    const char* nowhere = reinterpret_cast<const char*>(w.at);
    if (rows <= MOST_TOGETHER) return multiply_up_to<MOST_TOGETHER, 0>(rows, of, w, count, {nowhere, 0});
    if constexpr (MANY_ROWS > 0)
        if (rows >= MANY_ROWS) {
            const int many = rows / MANY_ROWS * MANY_ROWS;
            multiply_many(many, of, w, count, then);
            return many < rows ? multiply_vectors(rows - many, of.from(many, 0), w, count, then) : void();
        }
    constexpr int AT_ONCE = blocks_for(MOST_TOGETHER);
    for (int b = 0; b < count; b += AT_ONCE) {
        const int num = std::min(AT_ONCE, count - b);
        const char* next = reinterpret_cast<const char*>(b + AT_ONCE < count ? w.after(b + AT_ONCE).at : then.at);
        const Later later{next, AT_ONCE * BLOCK * int(sizeof(W))};
        if constexpr (WIDENS<W>) multiply_shared<AT_ONCE>(rows, of.from(0, b), widened(w.after(b), num), num, later);
        else multiply_shared<AT_ONCE>(rows, of.from(0, b), w.after(b), num, later);
    }
}

// Up to 64 rows; the stride between them matters to vectors only.
template <class T> struct Group {
    const typename Inputs<T>::Stored* at;
    int stride;
};
// Rows of a model in T: those of bfloat16 are multiplied in pairs of inputs, where the set does so.
template <class T, class W> static void multiply_rows(int rows, Some of, Blocks<W> w, int count, Blocks<W> then) {
    if constexpr (DOTS_BRAIN && std::is_same_v<T, bf16> && std::is_same_v<W, bf16>) {
        const auto in_pairs = [](Blocks<bf16> some) { return Blocks<BrainDots>{reinterpret_cast<const BrainDots*>(some.at), some.width}; };
        multiply_vectors(rows, of, in_pairs(w), count, in_pairs(then));
    } else multiply_vectors(rows, of, w, count, then);
}
// Blocks that are best multiplied together.
template <class T> static int together(int rows) { return has_tiles<T> && rows > 16 ? 2 : GROUP; }

// Up to 64 rows of x, a group of them, times `count` blocks of w. What is multiplied after them is fetched ahead; with tiles, some of the
// chore is done after every 32 inputs if there are more than 32 rows.
template <class T, class W, class C>
static void multiply_group(int rows, Group<T> x, Blocks<W> w, int count, Blocks<W> then, float* sums, [[maybe_unused]] C& chore) {
    const int wide = together<T>(rows) * BLOCK;
    if constexpr (has_tiles<T>) multiply_tiles(rows, x.at, w, count, then, sums, wide, chore);
    else multiply_rows<T>(rows, {x.at, x.stride, sums, wide}, w, count, then);
}
