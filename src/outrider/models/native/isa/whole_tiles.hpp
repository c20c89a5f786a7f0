// Products of whole numbers by tiles, where the instruction set has them.
#pragma once
#include "../stored_types.hpp"
#include "tiles.hpp"

#if defined(__AMX_INT8__) && !defined(OUTRIDER_ISA_GENERIC)
#include "amx_whole.hpp"
#else
constexpr int PANEL_ROWS = WHOLE_ROWS;           // rows whose spans are neighbours
constexpr int LEAST_TILE_ROWS = MOST_ROWS + 1;   // rows from which tiles are better than vectors: none
template <class W> static void multiply_by_tiles(int, Spans<InputSpan, PANEL_ROWS>, const W*, int, int, const W*, float*, int) {}
#endif
