// Vectors of 16 bytes in the compiler's own types: any processor.
#pragma once
constexpr int PART_BYTES = 16;
constexpr int QUERIES_AT_ONCE = 2;
constexpr int ACCUMULATORS = 3, MOST_TOGETHER = 3;  // 12 of 16 registers
constexpr bool WIDENS_FIRST = true;
constexpr const char* ISA_NAME = "generic";
#include "parts.hpp"

// The next four halves as words, and four numbers of 8 bits
INLINE Words words_at(const uint16_t* p) { return Words{p[0], p[1], p[2], p[3]}; }
INLINE Words upper_words_at(const uint16_t* p) { return words_at(p) << 16; }
INLINE Ints whole_numbers(const int8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
template <class I> INLINE I sixteen_numbers(const int8_t* p) {
    return {whole_numbers(p), whole_numbers(p + 4), whole_numbers(p + 8), whole_numbers(p + 12)};
}
#include "split.hpp"
#include "no_panel.hpp"
