// AVX2 with FMA: two registers of eight floats.
#pragma once
#include <immintrin.h>

constexpr int PART_BYTES = 32;
constexpr int QUERIES_AT_ONCE = 2;
constexpr int ACCUMULATORS = 6, MOST_TOGETHER = 6;  // 12 of 16 registers
constexpr bool WIDENS_FIRST = false;
constexpr const char* ISA_NAME = "avx2";
#include "parts.hpp"

// The next eight halves as words
INLINE Words words_at(const uint16_t* p) {
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE Words upper_words_at(const uint16_t* p) { return words_at(p) << 16; }
// The next eight numbers of 8 bits
INLINE Ints whole_numbers(const int8_t* p) {
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
template <class I> INLINE I sixteen_numbers(const int8_t* p) { return {whole_numbers(p), whole_numbers(p + 8)}; }
#include "split.hpp"
#include "no_panel.hpp"
