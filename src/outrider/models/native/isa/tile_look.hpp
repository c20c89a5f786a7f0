// What the queries of a pass see, by tiles, where the instruction set has them and the model fits.
#pragma once
#include "../model.hpp"
#include "../rows.hpp"

// Nothing fits where there are no tiles for T.
template <class T> struct TileLook {
    static bool fits(const Model&, const Pass&) { return false; }
    template <class R> void prepare(R&) {}
    template <class R> void look(R&, int&, int) {}
};
#if defined(__AMX_BF16__) && !defined(OUTRIDER_ISA_GENERIC)
#include "amx_look.hpp"
#endif
