// Matrices that stay where a program holds them already: [out][in], row after row.
//
// Sixteen rows are turned into a block (blocks.hpp) in memory of this thread just before they are multiplied. So products, and their bits,
// are those of packed matrices, and there is no second copy of the weights. Words are turned: a word is a float, or two bfloat16 of
// neighbouring inputs, which are neighbours in a block too.
#pragma once
#include "matmul.hpp"

struct HeldRows { const void* at; int64_t count; };  // sixteen, or fewer at the end of a matrix

template <class T> struct InPlace;
template <class T> struct Blocks<InPlace<T>> {
    const HeldRows* at;
    int in;
    Blocks after(int count) const { return {at + count, in}; }
    static Blocks of(const Matrix& w, int first) { return {static_cast<const HeldRows*>(w.packed) + first, w.in}; }
};

typedef uint32_t Four __attribute__((vector_size(16)));
template <int A, int B, int C, int D> INLINE Four mixed(Four a, Four b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, A, B, C, D);
#else
    return __builtin_shuffle(a, b, Four{A, B, C, D});
#endif
}
// Four words of four rows, to four columns
INLINE void turn_four(const uint32_t* from, size_t apart, uint32_t* to) {
    Four row[4], column[4];
    for (int i = 0; i < 4; i++) memcpy(&row[i], from + i * apart, sizeof row[i]);
    const Four low = mixed<0, 4, 1, 5>(row[0], row[1]), high = mixed<2, 6, 3, 7>(row[0], row[1]);
    const Four other_low = mixed<0, 4, 1, 5>(row[2], row[3]), other_high = mixed<2, 6, 3, 7>(row[2], row[3]);
    column[0] = mixed<0, 1, 4, 5>(low, other_low), column[1] = mixed<2, 3, 6, 7>(low, other_low);
    column[2] = mixed<0, 1, 4, 5>(high, other_high), column[3] = mixed<2, 3, 6, 7>(high, other_high);
    for (int i = 0; i < 4; i++) memcpy(to + i * BLOCK, &column[i], sizeof column[i]);
}
// A block of `words` words from each row, then zeros. Of what is read next, as much is brought near.
static void turn_rows(HeldRows rows, HeldRows next, int words, int width, uint32_t* to) {
    const uint32_t* from = static_cast<const uint32_t*>(rows.at);
    const char* later = static_cast<const char*>(next.at);
    const int fours = int(rows.count) / 4 * 4, whole = words / 4 * 4;
    if (rows.count < BLOCK || whole < width) memset(to, 0, size_t(width) * BLOCK * 4);
    for (int k = 0; k < whole; k += 4) {
        fetch<2>(later + size_t(k) * 64, 4);
        for (int j = 0; j < fours; j += 4) turn_four(from + size_t(j) * words + k, words, to + size_t(k) * BLOCK + j);
    }
    for (int j = 0; j < int(rows.count); j++)
        for (int k = j < fours ? whole : 0; k < words; k++) to[size_t(k) * BLOCK + j] = from[size_t(j) * words + k];
}
// Some blocks, turned
template <class T> static Blocks<T> turned(Blocks<InPlace<T>> w, int count, HeldRows next) {
    static thread_local Memory<T> memory;
    const int per_word = 4 / int(sizeof(T)), width = up(w.in, 32);
    const Blocks<T> found{memory.grow(size_t(width) * BLOCK * GROUP), width};
    for (int b = 0; b < count; b++) {
        uint32_t* to = reinterpret_cast<uint32_t*>(memory.data() + found.next() * b);
        turn_rows(w.at[b], b + 1 < count ? w.at[b + 1] : next, w.in / per_word, width / per_word, to);
    }
    return found;
}
// Up to 64 rows times `count` blocks
template <class T, class C>
static void multiply_group(int rows, Group<T> x, Blocks<InPlace<T>> w, int count, Blocks<InPlace<T>> then, float* sums, [[maybe_unused]] C& chore) {
    if constexpr (has_tiles<T>) {
        const Blocks<T> all = turned<T>(w, count, then.at[0]);
        multiply_group(rows, x, all, count, all, sums, chore);
    } else {
        constexpr int AT_ONCE = 2;  // near caches hold them
        const int wide = together<T>(rows) * BLOCK;
        for (int b = 0; b < count; b += AT_ONCE) {
            const int num = std::min(AT_ONCE, count - b);
            const Blocks<T> some = turned<T>(w.after(b), num, b + num < count ? w.at[b + num] : then.at[0]);
            multiply_rows<T>(rows, {x.at, x.stride, sums + b * BLOCK, wide}, some, num, some);
        }
    }
}
