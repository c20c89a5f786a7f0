// y = x W^T for a few rows x and a frozen W [out, in], at the speed memory delivers W.
//
// W is stored in blocks of 16 outputs, each block a stream over the inputs: for float32 [in][16], for bfloat16
// [in / 2][16][2], which is both what AMX tiles want and what vectors can read, for 8 bits [in / 2][2][16]. Each output is one chain
// of additions over the inputs in order, whatever the number of rows: so a row's result does not depend on who shares the pass.
// Weights of 8 bits become bfloat16, exactly, on their way into a tile; their scale multiplies the sum.
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
    const float* bias;    // [out] or null
    const float* scales;  // [out] of weights of 8 bits, or null
    int32_t in, out;
    int padded_in() const { return up(in, 32); }
    int num_blocks() const { return up(out, BLOCK) / BLOCK; }
};

// Blocks that lie one after the other.
template <class T> struct Blocks {
    const T* at;
    int width;
    size_t next() const { return size_t(width) * BLOCK; }
    static Blocks of(const Matrix& w, int first) {
        return {static_cast<const T*>(w.packed) + size_t(first) * w.padded_in() * BLOCK, w.padded_in()};
    }
};

// Brings lines near: hint 3 into the first-level cache, 2 into the second. A function that does nothing else would be taken for one
// that does nothing, and left out.
template <int HINT> static inline void fetch(const void* from, int num_lines) {
    for (int line = 0; line < num_lines; line++) __builtin_prefetch(static_cast<const char*>(from) + line * 64, 0, HINT);
    __asm__ volatile("");
}

// Lines that will be needed, brought into the second-level cache one at a time by whoever computes something else meanwhile.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    template <class T> static Ahead of(const T* from, size_t size) {
        return {reinterpret_cast<const char*>(from), reinterpret_cast<const char*>(from + size)};
    }
    void bring_one() {
        if (at >= end) return;
        fetch<2>(at, 1);
        at += 64;
    }
};

template <class W> static void pack(W* to, const W* from, int out, int in) {
    constexpr int PAIR = sizeof(W) == 4 ? 1 : 2, NEXT = sizeof(W) == 1 ? 1 : PAIR;
    const int width = up(in, 32);
    for (int j = 0; j < up(out, BLOCK); j++)
        for (int k = 0; k < width; k++) {
            const int odd = k % PAIR * (sizeof(W) == 1 ? BLOCK : 1);
            const size_t at = size_t(j / BLOCK) * width * BLOCK + size_t(k / PAIR) * BLOCK * PAIR + j % BLOCK * NEXT + odd;
            to[at] = j < out && k < in ? from[size_t(j) * in + k] : W(0);
        }
}

// The rows that go into a product. For tiles: [64 rows][in / 32][16 rows][16][32], each tile in one piece, so that those of one step
// are neighbours. For vectors: one after the other, an odd number of cache lines apart (a power of two would be one cache set).
template <class T> class Inputs {
  public:
    void reshape(int num_rows, int width) {
        rows = num_rows, columns = up(width, 32), stride = columns / 32 % 2 ? columns : columns + 32;
        data = memory.grow(size_t(up(num_rows, MOST_ROWS)) * stride);
    }
    // Sixteen numbers from a column divisible by 16 on are neighbours.
    T* at(int row, int column) {
        if constexpr (!has_tiles<T>) return data + size_t(row) * stride + column;
        const int within = row % MOST_ROWS, tiles = up(std::min(MOST_ROWS, rows - row + within), 16) / 16;
        return group(row - within) + size_t(column / 32) * tiles * 512 + within * 32 + column % 32;
    }
    int step() const { return has_tiles<T> ? 32 : stride; }  // from a row to the next within 64
    // One row, to be filled from end to end
    struct Line {
        T* begin;
        size_t apart;  // 32 columns and the next 32
        T* at(int column) const { return begin + column / 32 * apart + column % 32; }
        void put(int column, V sixteen) const { store(at(column), sixteen); }
    };
    Line line(int row) { return {at(row, 0), columns > 32 ? size_t(at(row, 32) - at(row, 0)) : 0}; }
    T* group(int first) { return data + size_t(first) * (has_tiles<T> ? columns : stride); }
    void put(int row, int column, V sixteen) { store(at(row, column), sixteen); }
    void clear(int row, int used) {  // what a product reads past the end
        for (int i = used; i < up(used, 32); i++) *at(row, i) = T(0);
    }
    int stride = 0;

  private:
    Memory<T> memory;
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
// The weights of 16 outputs for an even input and the next
static inline void load_pair(const bf16* from, V& even, V& odd) {
    U pair;
    memcpy(&pair, from, 64);
    even = bits(pair << 16), odd = bits(pair & 0xffff0000u);
}
static inline void load_pair(const int8_t* from, V& even, V& odd) { even = load(from), odd = load(from + BLOCK); }
template <int R, int B, class W> static void multiply(const bf16* x, int stride, const W* w, int width, float* sums, int wide) {
    V acc[R][B] = {};
    for (int k = 0; k < width; k += 2) {
        V even[B], odd[B];
        for (int b = 0; b < B; b++) load_pair(w + size_t(b) * width * BLOCK + size_t(k) * BLOCK, even[b], odd[b]);
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

template <int B, class T, class W> static void multiply_rows(int rows, const T* x, int stride, const W* w, int width, float* sums, int wide) {
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
// to 32: two tiles of rows times two blocks. Up to 64: the same, twice; there the last rows are padded.
static thread_local int shaped_for = 0;
static void shape_tiles(int rows) {
    if (rows == shaped_for) return;
    shaped_for = rows;
    TileShape shape;
    const bool is_one = rows <= 16;
    const int rest = rows > 32 ? 16 : is_one ? rows : rows - 16;
    for (int t = 0; t < 8; t++) {
        const bool is_short = is_one ? t <= 4 : t == 2 || t == 3 || t == 5;
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
// What is needed `steps` steps after step k of block b: further on in it, or of what is multiplied after these blocks
template <class W> static inline const W* later(Blocks<W> w, Blocks<W> then, int b, int k, int steps) {
    const int at = k + steps * 32;
    return at < w.width ? w.at + b * w.next() + size_t(at) * BLOCK : then.at + b * then.next() + size_t(at - w.width) * BLOCK;
}
// A tile of weights as it is multiplied: where it lies, or in `space`.
static inline const bf16* tile_of(const bf16* w, bf16*) { return w; }
static inline const bf16* tile_of(const int8_t* w, bf16* space) {
    for (int pair = 0; pair < 16; pair++) {
        V even, odd;
        load_pair(w + pair * 2 * BLOCK, even, odd);
        const U both = (bits(even) >> 16) | bits(odd);  // whole numbers up to 127 have nothing in their lower halves
        memcpy(space + pair * 2 * BLOCK, &both, 64);
    }
    written();
    return space;
}
template <int B, class W> static void multiply_flat(const bf16* x, Blocks<W> w, Blocks<W> then, float* sums, int wide) {
    alignas(64) bf16 space[4][512];
    const size_t next = w.next();
    const W* at = w.at;
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (B > 2) _tile_zero(2);
    if (B > 3) _tile_zero(3);
    for (int k = 0; k < w.width; k += 32, at += 512, x += 512) {
        for (int b = 0; b < B; b++) fetch<2>(later(w, then, b, k, AHEAD / 4 * 2 / sizeof(W)), 8 * sizeof(W));
        _tile_loadd(4, x, 64);
        _tile_loadd(5, tile_of(at, space[0]), 64);
        _tile_dpbf16ps(0, 4, 5);
        if (B > 1) { _tile_loadd(6, tile_of(at + next, space[1]), 64); _tile_dpbf16ps(1, 4, 6); }
        if (B > 2) { _tile_loadd(7, tile_of(at + 2 * next, space[2]), 64); _tile_dpbf16ps(2, 4, 7); }
        if (B > 3) { _tile_loadd(5, tile_of(at + 3 * next, space[3]), 64); _tile_dpbf16ps(3, 4, 5); }
    }
    _tile_stored(0, sums, wide * 4);
    if (B > 1) _tile_stored(1, sums + BLOCK, wide * 4);
    if (B > 2) _tile_stored(2, sums + 2 * BLOCK, wide * 4);
    if (B > 3) _tile_stored(3, sums + 3 * BLOCK, wide * 4);
}
// Where two blocks of weights go as they are multiplied, or one step of them
class Space {
  public:
    bf16 *at, *next;
    size_t step;
    static Space small() {
        alignas(64) static thread_local bf16 memory[2][512];
        return {memory[0], memory[1], 0};
    }
    static Space large(size_t block) {
        static thread_local Memory<bf16> memory;
        bf16* begin = memory.grow(2 * block);
        return {begin, begin + block, 512};
    }
};
// Two tiles of rows, `step` apart from those of the next step, times two blocks, `next` apart. fetch_weights(k, quarter) brings weights
// from memory; what the next step needs comes from the second-level cache meanwhile.
template <bool IS_PAIR, class W, class F>
static inline void multiply_square(const bf16* x, int step, Blocks<W> w, size_t next, Space space, float* sums, int wide, F fetch_weights) {
    const W* at = w.at;
    const auto bring = [&](int k, int quarter) {
        fetch_weights(k, quarter);
        fetch<3>(at + (quarter < 2 ? 0 : next) + 512 + quarter % 2 * 256, 4 * sizeof(W));
        if (quarter < 2 || IS_PAIR) fetch<3>(x + step + quarter * 256, 8);
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < w.width; k += 32, at += 512, x += step, space.at += space.step, space.next += space.step) {
        bring(k, 0);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, tile_of(at, space.at), 64);
        _tile_dpbf16ps(0, 4, 6);
        bring(k, 1);
        _tile_loadd(7, tile_of(at + next, space.next), 64);
        _tile_dpbf16ps(1, 4, 7);
        bring(k, 2);
        if (IS_PAIR) {
            _tile_loadd(5, x + 512, 64);
            _tile_dpbf16ps(2, 5, 6);
        }
        bring(k, 3);
        if (IS_PAIR) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, wide * 4);
    _tile_stored(1, sums + BLOCK, wide * 4);
    if (!IS_PAIR) return;
    _tile_stored(2, sums + 16 * wide, wide * 4);
    _tile_stored(3, sums + 16 * wide + BLOCK, wide * 4);
}
// More than 32 rows, in R tiles: two tiles times two blocks, then the rest with the same weights, which are near by then. Meanwhile
// the next two blocks are fetched from memory, evenly, and a chore is done, which finds the vector units idle.
template <int R, class W, class C>
static void multiply_tall(const bf16* x, Blocks<W> w, size_t next, Blocks<W> then, float* sums, int wide, C& chore) {
    const W* ahead = then.at;
    const auto even = [&](int k, int quarter) {
        fetch<2>(ahead + size_t(k) * BLOCK + quarter * 128, 2 * sizeof(W));
        if (quarter == 3) chore();
    };
    const Space space = sizeof(W) == 1 ? Space::large(w.next()) : Space::small();
    multiply_square<true>(x, R * 512, w, next, space, sums, wide, even);
    ahead += w.next();
    x += 1024, sums += 32 * wide;
    if constexpr (sizeof(W) == 1) multiply_square<R == 4>(x, R * 512, Blocks<bf16>{space.at, w.width}, next, space, sums, wide, even);
    else multiply_square<R == 4>(x, R * 512, w, next, space, sums, wide, even);
}
template <int B, class W> static void multiply_blocks(int rows, const bf16* x, Blocks<W> w, Blocks<W> then, float* sums, int wide) {
    const size_t next = B > 1 ? w.next() : 0;
    if (rows <= 16) return multiply_flat<B>(x, w, then, sums, wide);
    multiply_square<true>(x, 1024, w, next, Space::small(), sums, wide, [&](int k, int quarter) {
        fetch<2>(later(w, then, quarter / 2, k, AHEAD / 2) + quarter % 2 * 256, 4 * sizeof(W));
    });
}
#else
static void release_tiles() {}
#endif

// Up to 64 rows; the stride between them matters to vectors only.
template <class T> struct Group {
    const T* at;
    int stride;
};
// Blocks that are best multiplied together.
template <class T> static int together(int rows) { return has_tiles<T> && rows > 16 ? 2 : GROUP; }

// Up to 64 rows of x, a group of them, times `count` blocks of w. What is multiplied after them is fetched ahead; some of the chore
// is done after every 32 inputs if there are more than 32 rows and tiles.
template <class T, class W, class C>
static void multiply_group(int rows, Group<T> x, Blocks<W> w, int count, Blocks<W> then, float* sums, C& chore) {
    const int wide = together<T>(rows) * BLOCK;
#if defined(__AMX_BF16__)
    if constexpr (has_tiles<T>) {
        const size_t next = count > 1 ? w.next() : 0;
        shape_tiles(rows > 32 ? MOST_ROWS : rows);
        if (rows > 48) return multiply_tall<4>(x.at, w, next, then, sums, wide, chore);
        if (rows > 32) return multiply_tall<3>(x.at, w, next, then, sums, wide, chore);
        switch (count) {
            case 4: return multiply_blocks<4>(rows, x.at, w, then, sums, wide);
            case 3: return multiply_blocks<3>(rows, x.at, w, then, sums, wide);
            case 2: return multiply_blocks<2>(rows, x.at, w, then, sums, wide);
            default: return multiply_blocks<1>(rows, x.at, w, then, sums, wide);
        }
    }
#endif
    switch (count) {
        case 4: return multiply_rows<4>(rows, x.at, x.stride, w.at, w.width, sums, wide);
        case 3: return multiply_rows<3>(rows, x.at, x.stride, w.at, w.width, sums, wide);
        case 2: return multiply_rows<2>(rows, x.at, x.stride, w.at, w.width, sums, wide);
        default: return multiply_rows<1>(rows, x.at, x.stride, w.at, w.width, sums, wide);
    }
}
