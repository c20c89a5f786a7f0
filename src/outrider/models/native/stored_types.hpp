// The quantised types of a GGUF file: how the file lays weights out, and how they lie packed, in no more memory than in the file
// (the scales of Q4_K and Q5_K take 8 bits instead of 6, those of MXFP4 16 instead of 8). Q4_Z, Q4_F and Q8_F are ours: GPTQ, AWQ and compressed-tensors come to them
// (quantised/stored.py).
//
// A type's unit is 32 or 256 weights of an output. Packed, the units of sixteen outputs lie together, so that one vector holds the weights
// of sixteen outputs and four inputs. A weight is scale * (number - ZERO), plus an offset in some types.
#pragma once
#include <thread>

#include "stored_units.hpp"

// --- what a file has for a unit

static inline uint16_t half_at(const uint8_t* from) {
    uint16_t h;
    memcpy(&h, from, 2);
    return h;
}
// Bytes whose low halves come first, then the high ones
template <int SIZE> static inline void read_halves(const uint8_t* from, uint8_t* to) {
    constexpr uint64_t HALVES = 0x0f0f0f0f0f0f0f0f;
    for (int i = 0; i < SIZE; i += 8) {  // eight at a time: compilers take single bytes one by one
        uint64_t both;
        memcpy(&both, from + i, 8);
        const uint64_t low = both & HALVES, high = both >> 4 & HALVES;
        memcpy(to + i, &low, 8), memcpy(to + SIZE + i, &high, 8);
    }
}
static inline void read_fifth_bits(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < SPAN / 8; i++) {  // each bit of a byte in a byte of its own
        constexpr uint64_t EACH = 0x0101010101010101, BIT = 0x8040201008040201;
        uint64_t eight;
        memcpy(&eight, to + 8 * i, 8);
        eight |= (((EACH * from[i] & BIT) + EACH * 127) >> 7 & EACH) << 4;
        memcpy(to + 8 * i, &eight, 8);
    }
}
// Eight scales and eight offsets of 6 bits in 12 bytes (gguf/quants.py says how)
static inline void read_six_bits(const uint8_t* from, Unit& unit) {
    for (int i = 0; i < 4; i++) {
        unit.scales[i] = from[i] & 63, unit.offsets[i] = from[4 + i] & 63;
        unit.scales[4 + i] = (from[8 + i] & 15) | (from[i] >> 6 << 4), unit.offsets[4 + i] = (from[8 + i] >> 4) | (from[4 + i] >> 6 << 4);
    }
}

struct Q8_0 : Stored<8, 128, Scale> {
    static constexpr int FILE_BYTES = 34;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from);
        for (int i = 0; i < SPAN; i++) unit.numbers[i] = from[2 + i] ^ 128;  // signed bytes become unsigned ones, 128 more
    }
};
struct Q4_0 : Stored<4, 8, Scale> {
    static constexpr int FILE_BYTES = 18;
    static void read(const uint8_t* from, Unit& unit) { unit.scale = half_at(from), read_halves<16>(from + 2, unit.numbers); }
};
struct Q4_1 : Stored<4, 0, ScaleAndOffset> {
    static constexpr int FILE_BYTES = 20;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from), unit.offset = half_at(from + 2), read_halves<16>(from + 4, unit.numbers);
    }
};
struct Q5_0 : Stored<5, 16, Scale> {
    static constexpr int FILE_BYTES = 22;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from), read_halves<16>(from + 6, unit.numbers), read_fifth_bits(from + 2, unit.numbers);
    }
};
struct Q5_1 : Stored<5, 0, ScaleAndOffset> {
    static constexpr int FILE_BYTES = 24;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from), unit.offset = half_at(from + 2);
        read_halves<16>(from + 8, unit.numbers), read_fifth_bits(from + 4, unit.numbers);
    }
};
struct Q4_K : Stored<4, 0, ScalesAndOffsets> {
    static constexpr int FILE_BYTES = 144;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from), unit.offset = half_at(from + 2), read_six_bits(from + 4, unit);
        for (int i = 0; i < 4; i++) read_halves<SPAN>(from + 16 + i * SPAN, unit.numbers + i * 2 * SPAN);
    }
};
struct Q5_K : Stored<5, 0, ScalesAndOffsets> {
    static constexpr int FILE_BYTES = 176;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from), unit.offset = half_at(from + 2), read_six_bits(from + 4, unit);
        for (int i = 0; i < 4; i++) read_halves<SPAN>(from + 48 + i * SPAN, unit.numbers + i * 2 * SPAN);
        for (int group = 0; group < SPANS; group++)
            for (int i = 0; i < SPAN; i++) unit.numbers[group * SPAN + i] |= (from[16 + i] >> group & 1) << 4;
    }
};
struct Q6_K : Stored<6, 32, Scales> {
    static constexpr int FILE_BYTES = 210;
    static void read(const uint8_t* from, Unit& unit) {
        for (int half = 0; half < 2; half++) {
            uint8_t* to = unit.numbers + half * 128;
            read_halves<64>(from + half * 64, to);
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < SPAN; i++) to[part * SPAN + i] |= (from[128 + half * SPAN + i] >> 2 * part & 3) << 4;
        }
        memcpy(unit.scales, from + 192, 16), unit.scale = half_at(from + 208);
    }
};
struct IQ4_NL : Stored<4, 128, Scale, FineLevels> {
    static constexpr int FILE_BYTES = 18;
    static void read(const uint8_t* from, Unit& unit) { unit.scale = half_at(from), read_halves<16>(from + 2, unit.numbers); }
};
struct IQ4_XS : Stored<4, 128, ScalesAlone, FineLevels> {  // scales of 6 bits, 32 more than they are: the lower four apart from the others
    static constexpr int FILE_BYTES = 136;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from);
        for (int g = 0; g < SPANS; g++) {
            unit.scales[g] = int8_t(((from[4 + g / 2] >> 4 * (g % 2) & 15) | (half_at(from + 2) >> 2 * g & 3) << 4) - 32);
            read_halves<16>(from + 8 + g * 16, unit.numbers + g * SPAN);
        }
    }
};
struct MXFP4 : Stored<4, 16, UpperScale, SmallFloats> {  // a byte of exponent, 127 more than it is
    static constexpr int FILE_BYTES = 17;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = from[0] > 1 ? uint16_t((from[0] - 1) << 7) : uint16_t(32 << from[0]);  // a half of it, since numbers are twice theirs
        read_halves<16>(from + 1, unit.numbers);
    }
};

static inline float float_at(const uint8_t* from) {
    float x;
    memcpy(&x, from, 4);
    return x;
}
struct Q4_Z : Stored<4, 8, ScaleAndZero<uint16_t>> {
    static constexpr int FILE_BYTES = 19;
    static void read(const uint8_t* from, Unit& unit) {
        unit.scale = half_at(from), unit.zero = int8_t(from[2]), read_halves<16>(from + 3, unit.numbers);
    }
};
struct Q4_F : Stored<4, 8, ScaleAndZero<float>> {
    static constexpr int FILE_BYTES = 21;
    static void read(const uint8_t* from, Unit& unit) {
        unit.wide = float_at(from), unit.zero = int8_t(from[4]), read_halves<16>(from + 5, unit.numbers);
    }
};
struct Q8_F : Stored<8, 128, ScaleAndZero<float>> {
    static constexpr int FILE_BYTES = 37;
    static void read(const uint8_t* from, Unit& unit) {
        unit.wide = float_at(from), unit.zero = int8_t(from[4]);
        for (int i = 0; i < SPAN; i++) unit.numbers[i] = from[5 + i] ^ 128;
    }
};

// Floats of 16 bits in an embedding: HALF those of IEEE, BRAIN bfloat16 (quantised/stored.py). Packed: it is the head, packed (blocks.hpp).
constexpr int64_t HALF = 14, BRAIN = 15, PACKED_HALF = 16, PACKED_BRAIN = 17;
static inline void widen_row(const void* from, int64_t row, int64_t type, int in, float* to) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    const size_t block = size_t(row / BLOCK) * up(in, 32) * BLOCK, lane = size_t(row % BLOCK);
    for (int k = 0; k < in; k++) {
        const size_t pair = block + size_t(k / 2) * BLOCK * 2;
        const size_t at = type == PACKED_HALF ? pair + k % 2 * BLOCK + lane : type == PACKED_BRAIN ? pair + 2 * lane + k % 2 : size_t(row) * in + k;
        const uint16_t bits = half_at(bytes + 2 * at);
        to[k] = type == HALF || type == PACKED_HALF ? half_to_float(bits) : to_float(bf16(bits));
    }
}

// f.template operator()<W>() for the type of this number (NUMBERS in gguf/stored.py, and TYPES in quantised/stored.py)
template <class F> static auto with_type(int64_t number, F f) {
    switch (number) {
        case 1: return f.template operator()<Q8_0>();
        case 2: return f.template operator()<Q4_0>();
        case 3: return f.template operator()<Q4_1>();
        case 4: return f.template operator()<Q5_0>();
        case 5: return f.template operator()<Q5_1>();
        case 6: return f.template operator()<Q4_K>();
        case 7: return f.template operator()<Q5_K>();
        case 9: return f.template operator()<IQ4_NL>();
        case 10: return f.template operator()<IQ4_XS>();
        case 11: return f.template operator()<Q4_Z>();
        case 12: return f.template operator()<Q4_F>();
        case 13: return f.template operator()<Q8_F>();
        case 19: return f.template operator()<MXFP4>();
        default: return f.template operator()<Q6_K>();
    }
}

// --- rows of a file

// One row as floats
template <class W> static void dequantise(const uint8_t* row, int in, float* to) {
    constexpr int GROUP_SIZE = SPAN / W::GROUPS;
    Unit unit;
    for (int k = 0; k < in; k += W::WIDTH, row += W::FILE_BYTES, to += W::WIDTH) {
        W::read(row, unit);
        for (int group = 0; group < W::WIDTH / GROUP_SIZE; group++) {
            const float scale = W::scale_of(unit, group), offset = W::offset_of(unit, group);
            for (int i = group * GROUP_SIZE; i < (group + 1) * GROUP_SIZE; i++) to[i] = scale * float(W::number_of(unit.numbers[i])) + offset;
        }
    }
}
// Where a row begins in the file, and its type: 0 for a row of zeros
struct FileRow { int64_t at, type; };
// Where sixteen rows lie packed, and their type
struct Place { void* at; int64_t type; };

static inline size_t packed_size(int64_t type, int in) {
    return with_type(type, [&]<class W>() { return sizeof(W) * (in / W::WIDTH); });
}
// Sixteen rows or fewer
template <class W> static void pack_block(W* to, const uint8_t* file, const FileRow* rows, int count, int in) {
    memset(static_cast<void*>(to), 0, sizeof(W) * (in / W::WIDTH));
    Unit unit;
    for (int j = 0; j < count; j++)
        for (int k = 0; rows[j].type && k < in / W::WIDTH; k++) {
            W::read(file + rows[j].at + size_t(k) * W::FILE_BYTES, unit);
            to[k].put(j, unit);
        }
}
// Any rows; the sixteen of a block have one type.
static void pack_rows(Place* places, char* to, const uint8_t* file, const FileRow* rows, int out, int in, int num_threads) {
    const int num_blocks = up(out, BLOCK) / BLOCK;
    for (int b = 0; b < num_blocks; b++) places[b] = {to, rows[b * BLOCK].type}, to += packed_size(rows[b * BLOCK].type, in);
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; t++)
        threads.emplace_back([=] {
            for (int b = num_blocks * t / num_threads; b < num_blocks * (t + 1) / num_threads; b++)
                with_type(places[b].type, [&]<class W>() {
                    const FileRow* from = rows + b * BLOCK;
                    pack_block(static_cast<W*>(places[b].at), file, from, std::min(BLOCK, out - b * BLOCK), in);
                });
        });
    for (auto& thread : threads) thread.join();
}
