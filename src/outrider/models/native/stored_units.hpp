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
    static constexpr bool HAS_OFFSETS = false, HAS_ZEROS = false;
    uint16_t scales[BLOCK];
    void put(int j, const Unit& unit) { scales[j] = unit.scale; }
    Part scale(int strip, int, int) const { return part(scales + strip * STRIP); }
    static float scale_of(const Unit& unit, int) { return half_to_float(unit.scale); }
    static float offset_of(const Unit&, int) { return 0.0f; }
};
struct ScaleAndOffset {
    static constexpr int SPANS = 1, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = true, HAS_ZEROS = false;
    uint16_t scales[BLOCK], offsets[BLOCK];
    void put(int j, const Unit& unit) { scales[j] = unit.scale, offsets[j] = unit.offset; }
    Part scale(int strip, int, int) const { return part(scales + strip * STRIP); }
    Part offset(int strip, int) const { return part(offsets + strip * STRIP); }
    static float scale_of(const Unit& unit, int) { return half_to_float(unit.scale); }
    static float offset_of(const Unit& unit, int) { return half_to_float(unit.offset); }
};
template <class S> struct ScaleAndZero {  // S: 16 bits or float
    static constexpr int SPANS = 1, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = true, HAS_ZEROS = true;
    S scales[BLOCK];
    int8_t zeros[BLOCK];
    void put(int j, const Unit& unit) {
        if constexpr (sizeof(S) == 2) scales[j] = unit.scale;
        else scales[j] = unit.wide;
        zeros[j] = unit.zero;
    }
    Part scale(int strip, int, int) const { return part(scales + strip * STRIP); }
    Part zero(int strip) const { return part(zeros + strip * STRIP); }
    Part offset(int strip, int) const { return part(scales + strip * STRIP) * -part(zeros + strip * STRIP); }
    static float scale_of(const Unit& unit, int) { return sizeof(S) == 2 ? half_to_float(unit.scale) : unit.wide; }
    static float offset_of(const Unit& unit, int group) { return scale_of(unit, group) * -float(unit.zero); }
};
struct ScalesAndOffsets {  // eight of each, for 32 weights
    static constexpr int SPANS = 8, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = true, HAS_ZEROS = false;
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
    static constexpr bool HAS_OFFSETS = false, HAS_ZEROS = false;
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

struct UpperScale {  // one for 32 weights: the upper half of a float
    static constexpr int SPANS = 1, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = false, HAS_ZEROS = false;
    uint16_t scales[BLOCK];
    void put(int j, const Unit& unit) { scales[j] = unit.scale; }
    Part scale(int strip, int, int) const { return upper_part(scales + strip * STRIP); }
    static float scale_of(const Unit& unit, int) { return to_float(bf16(unit.scale)); }
    static float offset_of(const Unit&, int) { return 0.0f; }
};
struct ScalesAlone {  // eight, for 32 weights
    static constexpr int SPANS = 8, GROUPS = 1;
    static constexpr bool HAS_OFFSETS = false, HAS_ZEROS = false;
    uint16_t scales[BLOCK];
    int8_t factors[SPANS][BLOCK];
    void put(int j, const Unit& unit) {
        scales[j] = unit.scale;
        for (int g = 0; g < SPANS; g++) factors[g][j] = unit.scales[g];
    }
    Part scale(int strip, int span, int) const { return part(scales + strip * STRIP) * part(factors[span] + strip * STRIP); }
    static float scale_of(const Unit& unit, int group) { return half_to_float(unit.scale) * unit.scales[group]; }
    static float offset_of(const Unit&, int) { return 0.0f; }
};

// --- sixteen units. The numbers of a span are eight vectors [16 outputs][4 inputs], the first four of inputs 0 .. 15. Of fewer than 8
// bits, vector v < 4 has its low half-bytes where vector v + 4 has its high ones; then come the upper bits.

// What codes of four bits stand for: numbers, the same raised by ZERO, and the bits that those take
struct Plain {
    static constexpr int NUMBER_BITS = 0;
};
struct FineLevels {  // IQ4_NL and IQ4_XS
    static constexpr int NUMBER_BITS = 8;
    alignas(16) static constexpr int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    alignas(16) static constexpr uint8_t RAISED[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct SmallFloats {  // twice an e2m1 float
    static constexpr int NUMBER_BITS = 5;
    alignas(16) static constexpr int8_t LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    alignas(16) static constexpr uint8_t RAISED[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
};

template <int BITS_, int ZERO_, class S, class Table = Plain> struct Stored : S {
    static constexpr int BITS = BITS_, ZERO = ZERO_, WIDTH = S::SPANS * SPAN;
    static constexpr bool IS_CODED = Table::NUMBER_BITS > 0;
    static constexpr int READ_BITS = IS_CODED ? Table::NUMBER_BITS : BITS;  // of what is multiplied
    static constexpr bool IS_SIGNED = SIGNED_NUMBERS && !IS_CODED && (BITS == 8 || (BITS == 4 && ZERO == 8));
    static constexpr int TIMES = IS_SIGNED && BITS == 4 ? 16 : 1;  // what is read is the number times this
    uint8_t numbers[S::SPANS][BITS * 64];

    static int number_of(uint8_t code) {
        if constexpr (IS_CODED) return Table::LEVELS[code];
        else return code - ZERO;
    }

    void put(int j, const Unit& unit) {
        constexpr uint32_t HALF = 0x0f0f0f0f, ONE = 0x01010101;
        S::put(j, unit);
        for (int span = 0; span < S::SPANS; span++) {
            uint32_t words[8], upper[2] = {};
            memcpy(words, unit.numbers + span * SPAN, sizeof words);
            const auto keep = [&](int at, uint32_t four) { memcpy(numbers[span] + at * 64 + j * 4, &four, 4); };
            for (uint32_t& four : words) four = IS_SIGNED ? four ^ ZERO * ONE : four;
            for (int v = 0; v < 8; v++) {
                if constexpr (BITS == 8) keep(v, words[v]);
                if constexpr (BITS == 5) upper[0] |= (words[v] >> 4 & ONE) << v;
                if constexpr (BITS == 6) upper[v / 4] |= (words[v] >> 4 & 3 * ONE) << 2 * (v % 4);
            }
            for (int v = 0; v < 4 && BITS < 8; v++) keep(v, (words[v] & HALF) | (words[v + 4] & HALF) << 4);
            for (int i = 0; i < BITS - 4 && BITS < 8; i++) keep(4 + i, upper[i]);
        }
    }
    // Vectors v and v + 4 of a span, those of some outputs
    template <int v> [[gnu::always_inline]] void two(int strip, int span, Bytes& low, Bytes& high) const {
        const uint8_t* from = numbers[span] + strip * STRIP * 4;
        if constexpr (BITS == 8) {
            low = load_bytes(from + v * 64), high = load_bytes(from + (v + 4) * 64);
            return;
        }
        const Bytes both = load_bytes(from + v * 64);
        if constexpr (IS_CODED) {
            const void* table = SIGNED_NUMBERS && READ_BITS == 8 ? static_cast<const void*>(Table::LEVELS) : Table::RAISED;
            low = looked_up(table, low_halves(both)), high = looked_up(table, high_halves(both));
        } else if constexpr (IS_SIGNED) low = signed_low_halves(both), high = signed_high_halves(both);
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
};
