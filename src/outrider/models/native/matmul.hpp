// y = x W^T for a few rows x and a frozen W [out, in], at the speed memory delivers W.
//
// W is stored in blocks of 16 outputs, each block a stream over the inputs: for float32 [in][16], for bfloat16
// [in / 2][16][2], which is both what AMX tiles want and what vectors can read. Each output is one chain of additions over the
// inputs in order, whatever the number of rows: so a row's result does not depend on who shares the pass.
#pragma once
#include <algorithm>

#include "vector.hpp"
#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

constexpr int BLOCK = 16;  // outputs in a block
constexpr int GROUP = 4;   // blocks multiplied together

static inline int up(int n, int unit) { return (n + unit - 1) / unit * unit; }

struct Part {  // of the rows of a product; count 0: nothing comes after these blocks
    int index, count;
};
struct Matrix {
    const void* packed;
    const float* bias;  // [out] or null
    int32_t in, out;
    int padded_in() const { return up(in, 32); }
    int num_blocks() const { return up(out, BLOCK) / BLOCK; }
};

template <class T> static void pack(T* to, const T* from, int out, int in) {
    constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;
    const int width = up(in, 32);
    for (int j = 0; j < up(out, BLOCK); j++)
        for (int k = 0; k < width; k++) {
            size_t at = size_t(j / BLOCK) * width * BLOCK + size_t(k / PAIR) * BLOCK * PAIR + (j % BLOCK) * PAIR + k % PAIR;
            to[at] = j < out && k < in ? from[size_t(j) * in + k] : T(0);
        }
}

// Results of `rows` rows for blocks [first, first + count) go to sums[(row * GROUP + block) * 16].
template <int R, int B> static void multiply(const float* x, int stride, const float* w, int width, float* sums) {
    V acc[R][B] = {};
    for (int k = 0; k < width; k++) {
        V column[B];
        for (int b = 0; b < B; b++) column[b] = load(w + size_t(b) * width * BLOCK + size_t(k) * BLOCK);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) acc[r][b] += x[size_t(r) * stride + k] * column[b];
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(sums + (r * GROUP + b) * BLOCK, acc[r][b]);
}
template <int R, int B> static void multiply(const bf16* x, int stride, const bf16* w, int width, float* sums) {
    V acc[R][B] = {};
    for (int k = 0; k < width; k += 2) {
        V even[B], odd[B];
        for (int b = 0; b < B; b++) {
            U pair;
            memcpy(&pair, w + size_t(b) * width * BLOCK + size_t(k) * BLOCK, 64);
            even[b] = bits(pair << 16);
            odd[b] = bits(pair & 0xffff0000u);
        }
        for (int r = 0; r < R; r++) {
            float x0 = to_float(x[size_t(r) * stride + k]), x1 = to_float(x[size_t(r) * stride + k + 1]);
            for (int b = 0; b < B; b++) {
                acc[r][b] += x0 * even[b];
                acc[r][b] += x1 * odd[b];
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(sums + (r * GROUP + b) * BLOCK, acc[r][b]);
}

template <class T, int B> static void multiply_rows(int rows, const T* x, int stride, const T* w, int width, float* sums) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) multiply<4, B>(x + size_t(r) * stride, stride, w, width, sums + r * GROUP * BLOCK);
    for (; r + 2 <= rows; r += 2) multiply<2, B>(x + size_t(r) * stride, stride, w, width, sums + r * GROUP * BLOCK);
    for (; r < rows; r++) multiply<1, B>(x + size_t(r) * stride, stride, w, width, sums + r * GROUP * BLOCK);
}

#if defined(__AMX_BF16__)
// Some compilers do not know that a tile is loaded from memory: everything written must be there before.
static inline void written() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileShape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
// Tiles 0-3 hold sums, 4 (and 5) rows of x, the others weights. Up to 16 rows: four blocks, or fewer, side by side. More: two
// tiles of rows times two blocks, where every weight that was loaded is used twice.
static thread_local int shaped_for = 0;
static void shape_tiles(int rows) {
    if (rows == shaped_for) return;
    shaped_for = rows;
    TileShape shape;
    const int first = std::min(rows, 16), second = rows - 16;
    const int of_tile[8] = {first, first, rows > 16 ? second : first, rows > 16 ? second : first, first, rows > 16 ? second : 16, 16, 16};
    for (int t = 0; t < 8; t++) {
        shape.bytes[t] = 64;
        shape.rows[t] = uint8_t(of_tile[t]);
    }
    written();
    _tile_loadconfig(&shape);
}
static void release_tiles() {
    if (shaped_for) _tile_release();
    shaped_for = 0;
}
static inline void fetch(const bf16* from, int num_lines) {
    for (int line = 0; line < num_lines; line++) __builtin_prefetch(from + line * 32, 0, 2);
}
template <int B> static void multiply_tile(const bf16* x, int stride, const bf16* w, int width, float* sums) {
    const size_t next = size_t(width) * BLOCK;
    constexpr int AHEAD = 4 * 512;
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (B > 2) _tile_zero(2);
    if (B > 3) _tile_zero(3);
    for (int k = 0; k < width; k += 32, w += 512) {
        _tile_loadd(4, x + k, stride * 2);
        for (int b = 0; b < B; b++) fetch(w + b * next + AHEAD, 16);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (B > 1) { _tile_loadd(6, w + next, 64); _tile_dpbf16ps(1, 4, 6); }
        if (B > 2) { _tile_loadd(7, w + 2 * next, 64); _tile_dpbf16ps(2, 4, 7); }
        if (B > 3) { _tile_loadd(5, w + 3 * next, 64); _tile_dpbf16ps(3, 4, 5); }
    }
    _tile_stored(0, sums, GROUP * BLOCK * 4);
    if (B > 1) _tile_stored(1, sums + BLOCK, GROUP * BLOCK * 4);
    if (B > 2) _tile_stored(2, sums + 2 * BLOCK, GROUP * BLOCK * 4);
    if (B > 3) _tile_stored(3, sums + 3 * BLOCK, GROUP * BLOCK * 4);
}
// Memory is kept busy meanwhile: `num_lines` cache lines from `ahead` on are brought near with every step.
static void multiply_two(const bf16* x, int stride, const bf16* w, int width, float* sums, const bf16* ahead, int num_lines) {
    const size_t next = size_t(width) * BLOCK;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < width; k += 32, w += 512) {
        fetch(ahead, num_lines);
        ahead += num_lines * 32;
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + next, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + size_t(16) * stride + k, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    constexpr int STEP = GROUP * BLOCK;
    _tile_stored(0, sums, STEP * 4);
    _tile_stored(1, sums + BLOCK, STEP * 4);
    _tile_stored(2, sums + 16 * STEP, STEP * 4);
    _tile_stored(3, sums + 16 * STEP + BLOCK, STEP * 4);
}
template <int B> static void multiply_rows(int rows, const bf16* x, int stride, const bf16* w, int width, float* sums, Part part) {
    shape_tiles(rows);
    if (rows <= 16) return multiply_tile<B>(x, stride, w, width, sums);
    if (B == 2) {  // this part of the rows fetches its part of the next two blocks
        const int num_lines = part.count ? 32 / part.count : 0;
        return multiply_two(x, stride, w, width, sums, w + 2 * size_t(width) * BLOCK + size_t(part.index) * width * num_lines, num_lines);
    }
    for (int r = 0; r < rows; r += 16) {
        shape_tiles(std::min(16, rows - r));
        multiply_tile<B>(x + size_t(r) * stride, stride, w, width, sums + r * GROUP * BLOCK);
    }
}
#else
static void release_tiles() {}
#endif

// Blocks that are best multiplied together.
template <class T> static int together(int rows) { return sizeof(T) == 2 && rows > 16 ? 2 : GROUP; }

// Up to 32 rows of x times `count` blocks of w from `first` on.
template <class T>
static void multiply_group(int rows, const T* x, int stride, const Matrix& w, int first, int count, float* sums, Part part) {
    const T* from = static_cast<const T*>(w.packed) + size_t(first) * w.padded_in() * BLOCK;
    const int width = w.padded_in();
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2) {
        switch (count) {
            case 4: return multiply_rows<4>(rows, x, stride, from, width, sums, part);
            case 3: return multiply_rows<3>(rows, x, stride, from, width, sums, part);
            case 2: return multiply_rows<2>(rows, x, stride, from, width, sums, part);
            default: return multiply_rows<1>(rows, x, stride, from, width, sums, part);
        }
    }
#endif
    switch (count) {
        case 4: return multiply_rows<T, 4>(rows, x, stride, from, width, sums);
        case 3: return multiply_rows<T, 3>(rows, x, stride, from, width, sums);
        case 2: return multiply_rows<T, 2>(rows, x, stride, from, width, sums);
        default: return multiply_rows<T, 1>(rows, x, stride, from, width, sums);
    }
}
