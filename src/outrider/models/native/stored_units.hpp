// How quantised weights lie packed: units of sixteen outputs together, with their scales. stored_types.hpp names the types.
//
// A unit is 32 or 256 weights of an output. One vector holds the weights of sixteen outputs and four inputs. A weight is
// scale * (number - ZERO), plus an offset in some types.
#pragma once
#include "blocks.hpp"
#include "isa/dot.hpp"
#include "span_rows.hpp"

// One unit of one output, unpacked
struct Unit {
    alignas(64) uint8_t numbers[8 * SPAN];  // GCC 12 may read them as if they were aligned, and not align them itself
    uint16_t scale, offset;         // of 16 bits
    int8_t scales[16], offsets[8];  // of K types, group by group: factors of scale and offset
    float wide;                     // scale of 32 bits
    int8_t zero;                    // the number that stands for 0, less ZERO
};
static inline float half_to_float(uint16_t h) {
    uint16_t sixteen[LANES] = {h};
    return lane(load_half(sixteen), 0);
}

// --- scales of sixteen units: GROUPS of them in a span

struct Scale {  // one for 32 weights
    static constexpr int SPANS = 1, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = false;
    uint16_t scales[BLOCK];
    void put(int j, const Unit& unit) { scales[j] = unit.scale; }
    Part scale(int strip, int, int) const { return part(scales + strip * STRIP); }
    static float scale_of(const Unit& unit, int) { return half_to_float(unit.scale); }
    static float offset_of(const Unit&, int) { return 0.0f; }
};
struct ScaleAndOffset {
    static constexpr int SPANS = 1, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = true;
    uint16_t scales[BLOCK], offsets[BLOCK];
    void put(int j, const Unit& unit) { scales[j] = unit.scale, offsets[j] = unit.offset; }
    Part scale(int strip, int, int) const { return part(scales + strip * STRIP); }
    Part offset(int strip, int) const { return part(offsets + strip * STRIP); }
    static float scale_of(const Unit& unit, int) { return half_to_float(unit.scale); }
    static float offset_of(const Unit& unit, int) { return half_to_float(unit.offset); }
};
template <class S> struct ScaleAndZero {  // S: 16 bits or float
    static constexpr int SPANS = 1, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = true;
    S scales[BLOCK];
    int8_t zeros[BLOCK];
    void put(int j, const Unit& unit) {
        if constexpr (sizeof(S) == 2) scales[j] = unit.scale;
        else scales[j] = unit.wide;
        zeros[j] = unit.zero;
    }
    Part scale(int strip, int, int) const { return part(scales + strip * STRIP); }
    Part offset(int strip, int) const { return part(scales + strip * STRIP) * -part(zeros + strip * STRIP); }
    static float scale_of(const Unit& unit, int) { return sizeof(S) == 2 ? half_to_float(unit.scale) : unit.wide; }
    static float offset_of(const Unit& unit, int group) { return scale_of(unit, group) * -float(unit.zero); }
};
struct ScalesAndOffsets {  // eight of each, for 32 weights
    static constexpr int SPANS = 8, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = true;
    uint16_t scales[BLOCK], offsets[BLOCK];
    int8_t factors[SPANS][BLOCK], offset_factors[SPANS][BLOCK];
    void put(int j, const Unit& unit) {
        scales[j] = unit.scale, offsets[j] = unit.offset;
        for (int g = 0; g < SPANS; g++) factors[g][j] = unit.scales[g], offset_factors[g][j] = unit.offsets[g];
    }
    Part scale(int strip, int span, int) const { return part(scales + strip * STRIP) * part(factors[span] + strip * STRIP); }
    Part offset(int strip, int span) const { return part(offsets + strip * STRIP) * -part(offset_factors[span] + strip * STRIP); }
    static float scale_of(const Unit& unit, int group) { return half_to_float(unit.scale) * unit.scales[group]; }
    static float offset_of(const Unit& unit, int group) { return half_to_float(unit.offset) * -unit.offsets[group]; }
};
struct Scales {  // sixteen, for 16 weights
    static constexpr int SPANS = 8, GROUPS = 2;
    static constexpr bool HAS_OFFSETS = false;
    uint16_t scales[BLOCK];
    int8_t factors[SPANS * GROUPS][BLOCK];
    void put(int j, const Unit& unit) {
        scales[j] = unit.scale;
        for (int g = 0; g < SPANS * GROUPS; g++) factors[g][j] = unit.scales[g];
    }
    Part scale(int strip, int span, int group) const {
        return part(scales + strip * STRIP) * part(factors[span * GROUPS + group] + strip * STRIP);
    }
    static float scale_of(const Unit& unit, int group) { return half_to_float(unit.scale) * unit.scales[group]; }
    static float offset_of(const Unit&, int) { return 0.0f; }
};

// --- sixteen units. The numbers of a span are eight vectors [16 outputs][4 inputs], the first four of inputs 0 .. 15. Of fewer than 8
// bits, vector v < 4 has its low half-bytes where vector v + 4 has its high ones; then come the upper bits.

template <int BITS_, int ZERO_, class S> struct Stored : S {
    static constexpr int BITS = BITS_, ZERO = ZERO_, WIDTH = S::SPANS * SPAN;
    static constexpr bool IS_SIGNED = SIGNED_NUMBERS && (BITS == 8 || (BITS == 4 && ZERO == 8));
    static constexpr int TIMES = IS_SIGNED && BITS == 4 ? 16 : 1;  // what is read is the number times this
    uint8_t numbers[S::SPANS][BITS * 64];

    void put(int j, const Unit& unit) {
        S::put(j, unit);
        for (int span = 0; span < S::SPANS; span++)
            for (int v = 0; v < 4; v++) put_two(numbers[span], j, v, word(unit, span, v), word(unit, span, v + 4));
    }
    // Vectors v and v + 4 of a span, those of some outputs
    template <int v> [[gnu::always_inline]] void two(int strip, int span, Bytes& low, Bytes& high) const {
        const uint8_t* from = numbers[span] + strip * STRIP * 4;
        if constexpr (BITS == 8) {
            low = load_bytes(from + v * 64), high = load_bytes(from + (v + 4) * 64);
            return;
        }
        const Bytes both = load_bytes(from + v * 64);
        if constexpr (IS_SIGNED) low = signed_low_halves(both), high = signed_high_halves(both);
        else if constexpr (BITS == 4) low = low_halves(both), high = high_halves(both);
        if constexpr (BITS == 5) {
            const Bytes upper = load_bytes(from + 256);
            low = low_halves(both, upper_bits<v, 0x10>(upper)), high = high_halves(both, upper_bits<v + 4, 0x10>(upper));
        }
        if constexpr (BITS == 6) {
            low = low_halves(both, upper_bits<2 * v, 0x30>(load_bytes(from + 256)));
            high = high_halves(both, upper_bits<2 * v, 0x30>(load_bytes(from + 320)));
        }
    }

  private:
    static uint32_t word(const Unit& unit, int span, int v) {
        uint32_t four;
        memcpy(&four, unit.numbers + span * SPAN + v * 4, 4);
        return IS_SIGNED ? four ^ ZERO * 0x01010101u : four;
    }
    static void add(uint8_t* to, int j, uint32_t bits) {
        uint32_t was;
        memcpy(&was, to + j * 4, 4);
        was |= bits;
        memcpy(to + j * 4, &was, 4);
    }
    static void put_two(uint8_t* to, int j, int v, uint32_t low, uint32_t high) {
        constexpr uint32_t HALF = 0x0f0f0f0f, ONE = 0x01010101;
        if constexpr (BITS == 8) add(to + v * 64, j, low), add(to + (v + 4) * 64, j, high);
        else add(to + v * 64, j, (low & HALF) | (high & HALF) << 4);
        if constexpr (BITS == 5) add(to + 256, j, (low >> 4 & ONE) << v | (high >> 4 & ONE) << (v + 4));
        if constexpr (BITS == 6) add(to + 256, j, (low >> 4 & 3 * ONE) << 2 * v), add(to + 320, j, (high >> 4 & 3 * ONE) << 2 * v);
    }
};
