// Products of bfloat16 rows with bfloat16 weights in pairs of inputs, where the instruction set has them.
//
//   DOTS_BRAIN  whether it has
//   BrainDots   the weights of such a product, packed as bfloat16
//   FourInputs  the next four inputs of a row
//   add_pair    adds the products of R rows' inputs 2 PAIR and 2 PAIR + 1 with the weights of B blocks at weights(b)
#pragma once
#include <array>
#include <utility>

#include "../blocks.hpp"

struct BrainDots { bf16 number; };

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(OUTRIDER_ISA_GENERIC)
#include "neon_brain.hpp"
#elif defined(__AVX512BF16__) && !defined(__AMX_BF16__) && !defined(OUTRIDER_ISA_GENERIC)
#include "avx512_brain.hpp"
#else
constexpr bool DOTS_BRAIN = false;
struct FourInputs { explicit FourInputs(const float*) {} };
template <int PAIR, int R, int B, class F> INLINE void add_pair(V (&)[R][B], const std::array<FourInputs, R>&, F) {}
#endif
