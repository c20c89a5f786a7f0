// Tiles, where the instruction set has them.
#pragma once
#include "isa.hpp"
#if defined(__AMX_BF16__) && !defined(OUTRIDER_ISA_GENERIC)
#include "amx.hpp"
#else
static void release_tiles() {}
static bool has_permission() { return true; }
#endif
