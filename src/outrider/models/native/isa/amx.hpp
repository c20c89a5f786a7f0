// Products with AMX tiles: bfloat16 rows, weights of bfloat16 or of 8 bits, which become bfloat16, exactly, on their way into a tile.
#pragma once
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../blocks.hpp"

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
// Up to 64 rows of x times `count` blocks of w, side by side in sums; what is multiplied after them is fetched ahead, and some of the
// chore is done after every 32 inputs if there are more than 32 rows.
template <class W, class C>
static void multiply_tiles(int rows, const bf16* x, Blocks<W> w, int count, Blocks<W> then, float* sums, int wide, C& chore) {
    const size_t next = count > 1 ? w.next() : 0;
    shape_tiles(rows > 32 ? MOST_ROWS : rows);
    if (rows > 48) return multiply_tall<4>(x, w, next, then, sums, wide, chore);
    if (rows > 32) return multiply_tall<3>(x, w, next, then, sums, wide, chore);
    switch (count) {
        case 4: return multiply_blocks<4>(rows, x, w, then, sums, wide);
        case 3: return multiply_blocks<3>(rows, x, w, then, sums, wide);
        case 2: return multiply_blocks<2>(rows, x, w, then, sums, wide);
        default: return multiply_blocks<1>(rows, x, w, then, sums, wide);
    }
}
// Asks the system for the tile registers, where one must.
static bool has_permission() {
#if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
#else
    return true;
#endif
}
