// The same attention for up to sixteen queries of one key head at a time, with AMX tiles.
//
// Scores of all slots come from tiles with keys as they lie in the cache: [16 keys][16 queries], so everything up to the
// weights is done with queries in the lanes, slot after slot, and a slot that a query does not see has weight zero. Values
// older than RECENT positions are blended by tiles of 32 slots; the rest, where a tree's slots are not in order of position,
// one by one. What goes where depends on a query's position alone, so the result does not depend on the pass.
#pragma once
#include <vector>

#include "attention.hpp"
#include "matmul.hpp"

#if defined(__AMX_BF16__)
constexpr int QUERIES = 16;
constexpr int MAX_DIM = 256;
constexpr int RECENT = 32;  // the deepest tree, plus one, that keeps every addition in its place

struct Query {
    const float* from;
    bf16* to;
    Past<bf16> past;
    int blended;  // slots below `blended` are left to the tiles
};

class QueryTile {
  public:
    Query query[QUERIES];
    int count = 0;

    void attend(int head_dim, float scale, float cap) {
        dim = head_dim;
        measure();
        shape_tiles(16);
        pack_queries();
        written();
        score(scale, cap);
        weigh();
        blend_old();
        for (int q = 0; q < count; q++) {
            int from = 0;
            for (; from + 64 <= dim; from += 64) finish<4>(query[q], q, from);
            for (; from < dim; from += 16) finish<1>(query[q], q, from);
        }
    }

  private:
    void measure() {
        committed = query[0].past.committed;
        last = 0, first = committed, old = 0;
        for (int q = 0; q < count; q++) {
            const Past<bf16>& past = query[q].past;
            last = std::max(last, past.num_ancestors ? past.ancestors[past.num_ancestors - 1] + 1 : committed);
            first = std::min(first, past.begin);
            old = std::max(old, query[q].blended);
        }
        first = first / 32 * 32;
        const size_t needed = size_t(up(last, 32)) * QUERIES + size_t(QUERIES) * dim + size_t(last - committed) * QUERIES;
        if (space.size() < needed) space.resize(needed);
        weights = space.data();
        sums_ = weights + size_t(up(last, 32)) * QUERIES;
        seen = reinterpret_cast<int32_t*>(sums_ + QUERIES * dim);
        memset(seen, 0, size_t(last - committed) * QUERIES * 4);
        for (int q = 0; q < count; q++)
            for (int i = 0; i < query[q].past.num_ancestors; i++) seen[(query[q].past.ancestors[i] - committed) * QUERIES + q] = -1;
    }
    void pack_queries() {  // [dim / 2][query][2]
        alignas(64) bf16 row[MAX_DIM];
        uint32_t pair;
        if (count < QUERIES) memset(packed, 0, size_t(dim) * QUERIES * 2);
        for (int q = 0; q < count; q++) {
            for (int d = 0; d < dim; d += LANES) store(row + d, load(query[q].from + d));
            for (int d = 0; d < dim; d += 2) {
                memcpy(&pair, row + d, 4);
                memcpy(packed + (d / 2 * QUERIES + q) * 2, &pair, 4);
            }
        }
    }
    void score(float scale, float cap) {
        for (int slot = first; slot < last; slot += 16) {
            _tile_zero(0);
            for (int d = 0; d < dim; d += 32) {
                _tile_loadd(4, query[0].past.keys + size_t(slot) * dim + d, dim * 2);
                _tile_loadd(5, packed + d * QUERIES, 64);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, weights + size_t(slot) * QUERIES, 64);
        }
        I begins = {};
        for (int q = 0; q < count; q++) begins[q] = query[q].past.begin;
        most = splat(-1e30f);
        const bool windowed = first != largest_begin();
        for (int slot = first; slot < last; slot++) {
            V s = scale * load(weights + size_t(slot) * QUERIES);
            if (cap > 0) s = cap * tanh(s / cap);
            if (slot >= committed) {
                I mask;
                memcpy(&mask, seen + size_t(slot - committed) * QUERIES, 64);
                s = select(mask, s, splat(-INFINITY));
            } else if (windowed) s = select(begins <= slot, s, splat(-INFINITY));
            store(weights + size_t(slot) * QUERIES, s);
            most = max(most, s);
        }
    }
    int largest_begin() const {
        int most_begin = 0;
        for (int q = 0; q < count; q++) most_begin = std::max(most_begin, query[q].past.begin);
        return most_begin;
    }
    void weigh() {
        total = splat(0);
        for (int slot = first; slot < last; slot++) {
            const V weight = exp(load(weights + size_t(slot) * QUERIES) - most);
            store(weights + size_t(slot) * QUERIES, weight);
            total += weight;
        }
    }
    // sums[query][dim] over the slots left to the tiles
    void blend_old() {
        memset(sums_, 0, size_t(QUERIES) * dim * 4);
        for (int from = 0; from < dim && old > first; from += 64) {
            const int parts = std::min(4, (dim - from) / 16);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int slot = first; slot < old; slot += 32) {
                if (from == 0) pack_weights(slot);
                written();
                _tile_loadd(4, rows_of(slot), 64);
                for (int part = 0; part < parts; part++) {
                    pack_values(slot, from + part * 16);
                    written();
                    _tile_loadd(5, pairs, 64);
                    multiply(part);
                }
            }
            for (int part = 0; part < parts; part++) keep(part, sums_ + from + part * 16);
        }
    }
    static void multiply(int t) {
        switch (t) {
            case 0: _tile_dpbf16ps(0, 4, 5); break;
            case 1: _tile_dpbf16ps(1, 4, 5); break;
            case 2: _tile_dpbf16ps(2, 4, 5); break;
            default: _tile_dpbf16ps(3, 4, 5);
        }
    }
    void keep(int t, float* to) {
        switch (t) {
            case 0: _tile_stored(0, to, dim * 4); break;
            case 1: _tile_stored(1, to, dim * 4); break;
            case 2: _tile_stored(2, to, dim * 4); break;
            default: _tile_stored(3, to, dim * 4);
        }
    }
    // Weights of 32 slots as rows of a tile, [query][slot]. A query that blends some of them itself has zeros there.
    bf16* rows_of(int slot) {
        const size_t at = size_t(slot - first) / 32;
        if (rows.size() < (at + 1) * 512) rows.resize((at + 1) * 512);
        return rows.data() + at * 512;
    }
    void pack_weights(int slot) {
        bf16* to = rows_of(slot);
        I limit = {};
        for (int q = 0; q < count; q++) limit[q] = query[q].blended;
        for (int s = 0; s < 32; s += 2) {
            alignas(64) uint32_t pairs_of[QUERIES];
            const U even = rounded(slot + s, limit), odd = rounded(slot + s + 1, limit);
            const U both = even | (odd << 16);
            memcpy(pairs_of, &both, 64);
            for (int q = 0; q < QUERIES; q++) memcpy(to + q * 32 + s, pairs_of + q, 4);
        }
    }
    U rounded(int slot, I limit) const {  // weights are not NaN
        const U u = bits(select(limit > slot, load(weights + size_t(slot) * QUERIES), splat(0)));
        return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    }
    void pack_values(int slot, int from) {  // [slot / 2][dim][2]
        const bf16* values = query[0].past.values + size_t(slot) * dim + from;
        for (int s = 0; s < 32; s += 2, values += 2 * dim) {
            H even, odd;
            memcpy(&even, values, 32);
            memcpy(&odd, values + dim, 32);
            const U pair = __builtin_convertvector(even, U) | (__builtin_convertvector(odd, U) << 16);
            memcpy(pairs + s * 16, &pair, 64);
        }
    }
    // Recent slots in order of position, on top of the sums of the old ones.
    template <int C> void finish(const Query& one, int q, int from) {
        const Past<bf16>& past = one.past;
        const int size = past.size();
        V acc[C];
        for (int c = 0; c < C; c++) acc[c] = load(sums_ + size_t(q) * dim + from + c * LANES);
        for (int i = std::max(0, one.blended - past.origin); i < size; i++) {
            const int slot = past.slot(i);
            const float weight = weights[size_t(slot) * QUERIES + q];
            const bf16* value = past.values + size_t(slot) * dim + from;
            for (int c = 0; c < C; c++) acc[c] += weight * load(value + c * LANES);
        }
        for (int c = 0; c < C; c++) store(one.to + from + c * LANES, acc[c] / total[q]);
    }

    std::vector<float> space;
    std::vector<bf16> rows;
    int dim = 0, committed = 0, first = 0, last = 0, old = 0;
    float *weights = nullptr, *sums_ = nullptr;
    int32_t* seen = nullptr;
    V most, total;
    alignas(64) bf16 packed[MAX_DIM * QUERIES];
    alignas(64) bf16 pairs[512];
};
#endif
