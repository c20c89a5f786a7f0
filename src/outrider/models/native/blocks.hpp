// How matrices and the rows that are multiplied with them lie in memory.
//
// W [out, in] is stored in blocks of 16 outputs, each block a stream over the inputs: for float32 [in][16], for bfloat16
// [in / 2][16][2], which is both what AMX tiles want and what vectors can read, for 8 bits and IEEE's 16 bits [in / 2][2][16].
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "vector.hpp"

constexpr int BLOCK = 16;      // outputs in a block
constexpr int GROUP = 4;       // blocks multiplied together, at most
constexpr int MOST_ROWS = 64;  // rows multiplied together, at most
template <class T> constexpr bool has_tiles = HAS_TILES && sizeof(T) == 2;


constexpr int AS_STORED = 1;              // values of is_stored: as in a GGUF file, `packed` is [blocks] of Place (stored_types.hpp)
constexpr int IN_HALF = 2, IN_BRAIN = 3;  // IEEE's 16 bits, bfloat16
constexpr int IN_PLACE = 4;               // `packed` is [blocks] of HeldRows (in_place.hpp)
constexpr int IN_HALF_SUMS = 5;           // IEEE's 16 bits, products added in 16 bits (half_sums.hpp)
constexpr int WITH_FLOATS = 6;            // as in a GGUF file, and inputs stay floats (unpacked.hpp)
struct Matrix {
    const void* packed;
    const float* bias;    // [out] or null
    const float* scales;  // [out] of weights of 8 bits, or null
    int32_t in, out;
    int32_t is_stored;    // how, where it is not in the type of the pass: one of the numbers above; 0: in that type
    const int32_t* order; // [in] the input that each column multiplies, or null where columns are in order
    int padded_in() const { return up(in, 32); }
    int num_blocks() const { return up(out, BLOCK) / BLOCK; }
    bool has_places() const { return is_stored == AS_STORED || is_stored == WITH_FLOATS; }
};

// Blocks that lie one after the other.
template <class T> struct Blocks {
    const T* at;
    int width;
    size_t next() const { return size_t(width) * BLOCK; }
    Blocks after(int count) const { return {at + count * next(), width}; }
    static Blocks of(const Matrix& w, int first) {
        return Blocks{static_cast<const T*>(w.packed), w.padded_in()}.after(first);
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

// row(j): where row j lies, or null for a row of zeros
template <class W, class F> static void pack_by_row(W* to, F row, int out, int in) {
    constexpr bool IS_APART = sizeof(W) == 1 || std::is_same_v<W, half>;
    constexpr int PAIR = sizeof(W) == 4 ? 1 : 2, NEXT = IS_APART ? 1 : PAIR;
    const int width = up(in, 32);
    for (int j = 0; j < up(out, BLOCK); j++) {
        const W* from = j < out ? row(j) : nullptr;
        W* first = to + size_t(j / BLOCK) * width * BLOCK + j % BLOCK * NEXT;
        const auto at = [=](int k) { return first + size_t(k / PAIR) * BLOCK * PAIR + k % PAIR * (IS_APART ? BLOCK : 1); };
        const int given = from ? in : 0;
        for (int k = 0; k < given; k++) *at(k) = from[k];
        for (int k = given; k < width; k++) *at(k) = W{};
    }
}
template <class W> static void pack(W* to, const W* from, int out, int in) {
    pack_by_row(to, [=](int j) { return from + size_t(j) * in; }, out, in);
}

// The rows that go into a product. For tiles: [64 rows][in / 32][16 rows][16][32], each tile in one piece, so that those of one step
// are neighbours. For vectors: one after the other, an odd number of cache lines apart (a power of two would be one cache set).
template <class T> class Inputs {
  public:
    typedef std::conditional_t<has_tiles<T>, T, float> Stored;  // vectors multiply floats, rounded to T
    void reshape(int num_rows, int width) {
        lay(num_rows, width, nullptr);
        data = memory.grow(size_t(up(num_rows, MOST_ROWS)) * stride);
    }
    // The same at `to`, which holds room(num_rows, width); returns the end.
    Stored* lay(int num_rows, int width, Stored* to) {
        rows = num_rows, columns = up(width, 32), stride = stride_of(width), data = to;
        return to + room(num_rows, width);
    }
    static size_t room(int num_rows, int width) { return size_t(up(num_rows, 16)) * stride_of(width); }
    // Sixteen numbers from a column divisible by 16 on are neighbours.
    Stored* at(int row, int column) {
        if constexpr (!has_tiles<T>) return data + size_t(row) * stride + column;
        const int within = row % MOST_ROWS, tiles = up(std::min(MOST_ROWS, rows - row + within), 16) / 16;
        return group(row - within) + size_t(column / 32) * tiles * 512 + within * 32 + column % 32;
    }
    int step() const { return has_tiles<T> ? 32 : stride; }  // from a row to the next within 64
    // One row, to be filled from end to end
    struct Line {
        Stored* begin;
        size_t apart;  // 32 columns and the next 32
        Stored* at(int column) const { return begin + column / 32 * apart + column % 32; }
        void put(int column, V sixteen) const { write(at(column), sixteen); }
    };
    Line line(int row) { return {at(row, 0), columns > 32 ? size_t(at(row, 32) - at(row, 0)) : 0}; }
    Stored* group(int first) { return data + size_t(first) * (has_tiles<T> ? columns : stride); }
    void put(int row, int column, V sixteen) { write(at(row, column), sixteen); }
    void put_some(int row, int column, const float* from, int count) {
        int i = 0;
        for (; column % LANES == 0 && i + LANES <= count; i += LANES) put(row, column + i, load(from + i));
        for (; i < count; i++) write(at(row, column + i), from[i]);
    }
    void copy(int row, Inputs& from, int other, int width) {
        for (int i = 0; i < width; i += 32) memcpy(at(row, i), from.at(other, i), 32 * sizeof(Stored));
    }
    static void write(Stored* to, V sixteen) {
        if constexpr (has_tiles<T> || sizeof(T) == 4) store(to, sixteen);
        else store(to, rounded(sixteen));
    }
    static void write(Stored* to, float one) {
        if constexpr (sizeof(T) == 4) *to = one;
        else if constexpr (has_tiles<T>) *to = to_bf16(one);
        else *to = to_float(to_bf16(one));
    }
    void clear(int row, int used) {  // what a product reads past the end
        for (int i = used; i < up(used, 32); i++) *at(row, i) = Stored(0);
    }
    int stride = 0;

  private:
    static int stride_of(int width) { return up(width, 32) / 32 % 2 ? up(width, 32) : up(width, 32) + 32; }
    Memory<Stored> memory;
    Stored* data = nullptr;
    int rows = 0, columns = 0;
};
