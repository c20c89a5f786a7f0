// The values of one key head, packed for AMX tiles, and what brings pages near before they are looked at.
#pragma once
#include "../attention.hpp"
#include "amx.hpp"

// Sixteen rows of sixteen words become columns.
static inline void transpose(__m512i* v) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            const __m512i a = v[8 * half + i], b = v[8 * half + i + 4];
            t[8 * half + i] = _mm512_shuffle_i32x4(a, b, 0x88), t[8 * half + i + 4] = _mm512_shuffle_i32x4(a, b, 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// The values of one key head as they are blended: old ones for tiles, [32 slots][16 dimensions][dimension][slot], recent ones as floats.
class PackedValues {
  public:
    // A page has a multiple of 32 slots.
    void pack(const Slots<bf16>& values, int head_dim, int begin, int end) {
        first = begin, dim = head_dim;
        if (end <= begin) return;
        tiles.grow(size_t(end - begin) * dim);
        alignas(64) uint16_t low[32], high[32];
        for (int i = 0; i < 32; i++) low[i] = uint16_t(i / 2 + i % 2 * 32), high[i] = uint16_t(low[i] + 16);
        const __m512i lower = _mm512_load_si512(low), upper = _mm512_load_si512(high);
        for (int slot = begin; slot < end; slot += 32) {
            const bf16* from = values.at(slot);
            for (int d = 0; d < dim; d += 32) {
                __m512i left[16], right[16];
                for (int pair = 0; pair < 16; pair++) {
                    const bf16* at = from + size_t(2 * pair) * dim + d;
                    const __m512i even = _mm512_loadu_si512(at), odd = _mm512_loadu_si512(at + dim);
                    left[pair] = _mm512_permutex2var_epi16(even, lower, odd), right[pair] = _mm512_permutex2var_epi16(even, upper, odd);
                }
                put(tile(slot, d), left), put(tile(slot, d + 16), right);
            }
        }
    }
    void unpack(const Slots<bf16>& values, int begin, int end) {
        first_float = begin;
        if (end <= begin) return;
        floats.grow(size_t(end - begin) * dim);
        for (int slot = begin; slot < end; slot++) {
            const bf16* from = values.at(slot);
            for (int d = 0; d < dim; d += LANES) store(floats.data() + size_t(slot - begin) * dim + d, load(from + d));
        }
    }
    bf16* tile(int slot, int d) { return tiles.data() + size_t(slot - first) * dim + d * 32; }
    const float* line(int slot) const { return floats.data() + size_t(slot - first_float) * dim; }

  private:
    static void put(bf16* to, __m512i* block) {
        transpose(block);
        for (int d = 0; d < 16; d++) _mm512_storeu_si512(to + d * 32, block[d]);
    }
    Memory<bf16> tiles;
    Memory<float> floats;
    int first = 0, first_float = 0, dim = 0;
};

// Slots [slot, last) that will be looked at, brought near line by line.
class PagesAhead {
  public:
    PagesAhead() = default;
    PagesAhead(const Slots<bf16>& slots, int first, int end) : of(slots), slot(first), last(end) {}
    void bring_one() {
        if (now.at >= now.end && slot < last) {
            const int end = std::min(of.end(slot), last);
            now = Ahead::of(of.at(slot), size_t(end - slot) * of.dim), slot = end;
        }
        now.bring_one();
    }

  private:
    Slots<bf16> of{};
    int slot = 0, last = 0;
    Ahead now;
};
