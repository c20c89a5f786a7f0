// The instruction set this is compiled for. Each header gives the same names for sixteen floats at a time:
//
//   V, I          sixteen floats, sixteen whole numbers of 32 bits; arithmetic and comparisons lane by lane
//   load, store   from and to float, bfloat16 and 8 bits (load only), and load_pair: bfloat16 weights of an even input and the next
//   rounded       to bfloat16 and back
//   exp, inverse, exp_of_minus<T> (as exact as T needs), max, largest, select
//   dots<Q>       products of Q queries with sixteen keys, each added up in a fixed order; best with QUERIES_AT_ONCE of them
//   LEAST_ACROSS  queries from which dots_across finds the same bits faster, of MOST_ACROSS dimensions or fewer; 0: none
//   ACCUMULATORS  vectors V that stay in registers while a product or a blend adds to them
//   MOST_TOGETHER rows that are multiplied together with one reading of the weights
//   MANY_ROWS     rows times MANY_BLOCKS where there are so many (a prompt): each reading of the weights serves more; 0: none
//   HAS_PANELS    multiply_panel: MOST_TOGETHER rows times a block of floats, better than the compiler does it
//   WIDENS_FIRST  for more rows than MOST_TOGETHER, weights of fewer than 32 bits are written out as floats once
//   HAS_TILES     bfloat16 is multiplied by tiles (tiles.hpp)
//   ISA_NAME
//
// Every function works lane by lane, so a number never depends on its neighbours.
#pragma once
#if defined(OUTRIDER_ISA_GENERIC)
#include "generic.hpp"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__)
#include "avx2.hpp"
#elif defined(__aarch64__)
#include "neon.hpp"
#else
#include "generic.hpp"
#endif
