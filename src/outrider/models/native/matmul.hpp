// y = x W^T for a few rows x and a frozen W [out, in], at the speed memory delivers W.
//
// W is stored in blocks of 16 outputs, each block a stream over the inputs: for float32 [in][16], for bfloat16
// [in / 2][16][2], which is both what AMX tiles want and what vectors can read. Each output is one chain of additions over the
// inputs in order, whatever the number of rows: so a row's result does not depend on who shares the pass.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.hpp"
#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

constexpr int BLOCK = 16;      // outputs in a block
constexpr int GROUP = 4;       // blocks multiplied together, at most
constexpr int MOST_ROWS = 64;  // rows multiplied together, at most
#if defined(__AMX_BF16__)
template <class T> constexpr bool has_tiles = sizeof(T) == 2;
#else
template <class T> constexpr bool has_tiles = false;
#endif

static inline int up(int n, int unit) { return (n + unit - 1) / unit * unit; }

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

// The rows that go into a product. For tiles: [64 rows][in / 32][16 rows][16][32], each tile in one piece, so that those of one step
// are neighbours. For vectors: one after the other, an odd number of cache lines apart (a power of two would be one cache set).
template <class T> class Inputs {
  public:
    void reshape(int num_rows, int width) {
        rows = num_rows, columns = up(width, 32), stride = columns / 32 % 2 ? columns : columns + 32;
        const size_t needed = size_t(up(num_rows, MOST_ROWS)) * stride * sizeof(T) + 64;
        if (memory.size() < needed) memory.resize(needed);
        data = reinterpret_cast<T*>((uintptr_t(memory.data()) + 63) & ~uintptr_t(63));
    }
    // Sixteen numbers from a column divisible by 16 on are neighbours.
    T* at(int row, int column) {
        if constexpr (!has_tiles<T>) return data + size_t(row) * stride + column;
        const int within = row % MOST_ROWS, tiles = up(std::min(MOST_ROWS, rows - row + within), 16) / 16;
        return group(row - within) + ((size_t(column / 32) * tiles + within / 16) * 16 + within % 16) * 32 + column % 32;
    }
    T* group(int first) { return data + size_t(first) * (has_tiles<T> ? columns : stride); }
    void put(int row, int column, V sixteen) { store(at(row, column), sixteen); }
    void clear(int row, int used) {  // what a product reads past the end
        for (int i = used; i < up(used, 32); i++) *at(row, i) = T(0);
    }
    int stride = 0;

  private:
    std::vector<uint8_t> memory;
    T* data = nullptr;
    int rows = 0, columns = 0;
};

// Results of `rows` rows for blocks [first, first + count) go to sums[row * wide + block * 16].
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
template <int R, int B> static void multiply(const bf16* x, int stride, const bf16* w, int width, float* sums, int wide) {
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
        for (int b = 0; b < B; b++) store(sums + size_t(r) * wide + b * BLOCK, acc[r][b]);
}

template <class T, int B> static void multiply_rows(int rows, const T* x, int stride, const T* w, int width, float* sums, int wide) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) multiply<4, B>(x + size_t(r) * stride, stride, w, width, sums + size_t(r) * wide, wide);
    for (; r + 2 <= rows; r += 2) multiply<2, B>(x + size_t(r) * stride, stride, w, width, sums + size_t(r) * wide, wide);
    for (; r < rows; r++) multiply<1, B>(x + size_t(r) * stride, stride, w, width, sums + size_t(r) * wide, wide);
}

#if defined(__AMX_BF16__)
// Some compilers do not know that a tile is loaded from memory: everything written must be there before.
static inline void written() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileShape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
// Tiles 0-3 hold sums, 4 and 5 rows of x, 6 and 7 weights. Up to 16 rows: four blocks side by side, or fewer (5 holds weights too). Up
// to 32: two tiles of rows times two blocks. Up to 64: three or four tiles of rows (7 holds rows too) times one block.
static thread_local int shaped_for = 0;
static void shape_tiles(int rows) {
    if (rows == shaped_for) return;
    shaped_for = rows;
    TileShape shape;
    const int tiles = up(rows, 16) / 16, rest = rows - 16 * (tiles - 1), last = tiles == 1 ? 0 : tiles == 2 ? 2 : tiles - 1;
    for (int t = 0; t < 8; t++) {
        const bool is_short = t < 4 ? t >= last : t == (tiles == 1 ? 4 : 5);
        shape.bytes[t] = 64;
        shape.rows[t] = uint8_t(is_short ? rest : 16);
    }
    written();
    _tile_loadconfig(&shape);
}
static void release_tiles() {
    if (shaped_for) _tile_release();
    shaped_for = 0;
}
// Memory is kept busy while tiles are multiplied: weights are fetched this many tiles before they are needed, a few lines
// at a time. The rows come from the second-level cache one step early, or their loads would queue behind the weights.
constexpr int AHEAD = 16;
template <int HINT> static inline void fetch(const bf16* from, int num_lines) {
    for (int line = 0; line < num_lines; line++) __builtin_prefetch(from + line * 32, 0, HINT);
}
template <int B> static void multiply_flat(const bf16* x, const bf16* w, int width, float* sums, int wide) {
    const size_t next = size_t(width) * BLOCK;
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (B > 2) _tile_zero(2);
    if (B > 3) _tile_zero(3);
    for (int k = 0; k < width; k += 32, w += 512, x += 512) {
        const size_t ahead = AHEAD / 4 * 512 + (k + AHEAD / 4 * 32 < width ? 0 : (B - 1) * next);  // at the end, the next blocks
        _tile_loadd(4, x, 64);
        for (int b = 0; b < B; b++) fetch<2>(w + b * next + ahead, 16);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (B > 1) { _tile_loadd(6, w + next, 64); _tile_dpbf16ps(1, 4, 6); }
        if (B > 2) { _tile_loadd(7, w + 2 * next, 64); _tile_dpbf16ps(2, 4, 7); }
        if (B > 3) { _tile_loadd(5, w + 3 * next, 64); _tile_dpbf16ps(3, 4, 5); }
    }
    _tile_stored(0, sums, wide * 4);
    if (B > 1) _tile_stored(1, sums + BLOCK, wide * 4);
    if (B > 2) _tile_stored(2, sums + 2 * BLOCK, wide * 4);
    if (B > 3) _tile_stored(3, sums + 3 * BLOCK, wide * 4);
}
static void multiply_square(const bf16* x, const bf16* w, size_t next, int width, float* sums, int wide) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < width; k += 32, w += 512, x += 1024) {
        const bf16 *one = w + AHEAD / 2 * 512 + (k + AHEAD / 2 * 32 < width ? 0 : next), *two = one + next, *rows = x + 1024;
        fetch<2>(one, 8), fetch<3>(rows, 8);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        fetch<2>(one + 256, 8), fetch<3>(rows + 256, 8);
        _tile_loadd(7, w + next, 64);
        _tile_dpbf16ps(1, 4, 7);
        fetch<2>(two, 8), fetch<3>(rows + 512, 8);
        _tile_loadd(5, x + 512, 64);
        _tile_dpbf16ps(2, 5, 6);
        fetch<2>(two + 256, 8), fetch<3>(rows + 768, 8);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, wide * 4);
    _tile_stored(1, sums + BLOCK, wide * 4);
    _tile_stored(2, sums + 16 * wide, wide * 4);
    _tile_stored(3, sums + 16 * wide + BLOCK, wide * 4);
}
template <int R> static void multiply_tall(const bf16* x, const bf16* w, int width, float* sums, int wide) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if (R > 3) _tile_zero(3);
    for (int k = 0; k < width; k += 32, w += 512, x += R * 512) {
        const bf16 *ahead = w + AHEAD * 512, *rows = x + R * 512;
        fetch<2>(ahead, 4), fetch<3>(rows, 16);
        _tile_loadd(6, w, 64);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        fetch<2>(ahead + 128, 4), fetch<3>(rows + 512, 16);
        _tile_loadd(7, x + 512, 64);
        _tile_dpbf16ps(1, 7, 6);
        fetch<2>(ahead + 256, 4), fetch<3>(rows + 1024, 16);
        if (R > 3) {
            _tile_loadd(4, x + 1024, 64);
            _tile_dpbf16ps(2, 4, 6);
            fetch<3>(rows + 1536, 16);
        }
        fetch<2>(ahead + 384, 4);
        _tile_loadd(5, x + (R - 1) * 512, 64);
        if (R > 3) _tile_dpbf16ps(3, 5, 6);
        else _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, sums, wide * 4);
    _tile_stored(1, sums + 16 * wide, wide * 4);
    _tile_stored(2, sums + 32 * wide, wide * 4);
    if (R > 3) _tile_stored(3, sums + 48 * wide, wide * 4);
}
template <int B> static void multiply_blocks(int rows, const bf16* x, const bf16* w, int width, float* sums, int wide) {
    const size_t next = size_t(width) * BLOCK;
    shape_tiles(rows);
    if (rows <= 16) return multiply_flat<B>(x, w, width, sums, wide);
    if (rows <= 32) return multiply_square(x, w, B > 1 ? next : 0, width, sums, wide);
    for (int b = 0; b < B; b++) {
        if (rows <= 48) multiply_tall<3>(x, w + b * next, width, sums + b * BLOCK, wide);
        else multiply_tall<4>(x, w + b * next, width, sums + b * BLOCK, wide);
    }
}
#else
static void release_tiles() {}
#endif

// Blocks that are best multiplied together.
template <class T> static int together(int rows) { return has_tiles<T> && rows > 16 ? 2 : GROUP; }

// Up to 64 rows of x, a group of them, times `count` blocks of w from `first` on.
template <class T> static void multiply_group(int rows, const T* x, int stride, const Matrix& w, int first, int count, float* sums) {
    const T* from = static_cast<const T*>(w.packed) + size_t(first) * w.padded_in() * BLOCK;
    const int width = w.padded_in(), wide = together<T>(rows) * BLOCK;
#if defined(__AMX_BF16__)
    if constexpr (has_tiles<T>) {
        switch (count) {
            case 4: return multiply_blocks<4>(rows, x, from, width, sums, wide);
            case 3: return multiply_blocks<3>(rows, x, from, width, sums, wide);
            case 2: return multiply_blocks<2>(rows, x, from, width, sums, wide);
            default: return multiply_blocks<1>(rows, x, from, width, sums, wide);
        }
    }
#endif
    switch (count) {
        case 4: return multiply_rows<T, 4>(rows, x, stride, from, width, sums, wide);
        case 3: return multiply_rows<T, 3>(rows, x, stride, from, width, sums, wide);
        case 2: return multiply_rows<T, 2>(rows, x, stride, from, width, sums, wide);
        default: return multiply_rows<T, 1>(rows, x, stride, from, width, sums, wide);
    }
}
