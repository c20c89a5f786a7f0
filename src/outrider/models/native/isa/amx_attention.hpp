// The attention of attention.hpp for up to sixteen queries of one key head at a time, with AMX tiles.
//
// Scores of all slots come from tiles with keys as they lie in the cache: [16 keys][16 queries], so everything up to the
// result is done with queries in the lanes, slot after slot, and a slot that a query does not see has weight zero. Values
// older than RECENT positions are blended by tiles of 32 slots; the rest, where a tree's slots are not in order of position,
// one by one. What goes where depends on a query's position alone, so the result does not depend on the pass.
#pragma once
#include <vector>

#include "amx_packed.hpp"

constexpr int QUERIES = 16;
constexpr int MAX_DIM = 256;
constexpr int RECENT = 32;  // the deepest tree, plus one, that keeps every addition in its place

// Queries one after the other, those of a row next to each other
struct Queries {
    const bf16* from;
    int count, per_row;
    int row, column;  // where what the first saw goes
};

// What the queries of a tile see, slot by slot: the same for all heads, and for all layers with the same window.
class Sight {
  public:
    int committed, first, last, latest;  // slots [first, last) are looked at, and [latest, committed) seen by all
    int old = 0, lowest = 1 << 30;       // below `lowest` values are left to the tiles by all queries, below `old` by some
    I begins = {}, limits = {};          // of each query: the first slot it sees, and the first whose value it adds itself
    std::vector<int32_t> seen;           // [slot - committed] bit of each query that sees it
    std::vector<int32_t> branch;         // uncommitted slots that any query sees

    explicit Sight(int num_committed) : committed(num_committed), first(num_committed), last(num_committed), latest(0) {}
    void add(const Past<bf16>& past, int blended, int num_queries) {
        for (int i = 0; i < past.num_ancestors; i++) {
            const size_t at = size_t(past.ancestors[i] - committed);
            if (seen.size() <= at) seen.resize(at + 1);
            seen[at] |= ((1 << num_queries) - 1) << count;
        }
        first = std::min(first, past.begin / 32 * 32), latest = std::max(latest, past.begin);
        old = std::max(old, blended), lowest = std::min(lowest, blended);
        for (int end = count + num_queries; count < end; count++) begins[count] = past.begin, limits[count] = blended;
    }
    void close() {
        last = committed + int(seen.size()), lowest = std::max(lowest, first);
        for (int slot = committed; slot < last; slot++)
            if (seen[slot - committed]) branch.push_back(slot);
    }
    __mmask16 who_sees(int slot) const { return _mm512_cmple_epi32_mask((__m512i)begins, _mm512_set1_epi32(slot)); }
    __mmask16 who_sees_new(int slot) const { return __mmask16(seen[slot - committed]); }

  private:
    int count = 0;
};

class QueryTile {
  public:
    int dim = 0;  // of a head
    PagesAhead next_keys, next_values;  // of what is looked at after this
    PackedValues values;  // old: below the largest `blended`; recent: from the smallest on

    void attend(const Queries& queries, const Sight& sight, const Slots<bf16>& keys, float scale, float cap, Inputs<bf16>& out) {
        weights.grow(size_t(sight.first + up(sight.last - sight.first, 64)) * QUERIES);
        shape_tiles(16);
        pack(queries);
        written();
        score(sight, keys, scale, cap);
        weigh(sight, cap > 0 ? 1.0f : scale);
        blend_old(sight);
        blend_recent(sight);
        put(queries, out);
    }

  private:
    float* at(int slot) const { return weights.data() + size_t(slot) * QUERIES; }
    static __m512i in_turn() {  // lane i of the lower half, then lane i of the upper
        alignas(64) static constexpr uint16_t turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return _mm512_load_si512(turns);
    }
    void pack(const Queries& queries) {  // [dim / 2][query][2]
        __m512i block[QUERIES];
        for (int d = 0; d < dim; d += 32) {
            for (int q = 0; q < QUERIES; q++) block[q] = q < queries.count ? _mm512_loadu_si512(queries.from + q * dim + d) : _mm512_setzero_si512();
            transpose(block);
            for (int pair = 0; pair < 16; pair++) _mm512_store_si512(packed + (d / 2 + pair) * 32, block[pair]);
        }
    }
    // weights[slot][query] = query . key
    void score(const Sight& sight, const Slots<bf16>& keys, float scale, float cap) {
        const int last = sight.last, committed = sight.committed;
        V found[4];  // each a chain of comparisons
        for (V& one : found) one = splat(-1e30f);
        for (int slot = sight.first; slot < last; slot += 64) {
            const int num = std::min(4, (last - slot + 15) / 16), step = dim * 2;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            const bf16* key[4] = {};
            for (int i = 0; i < num; i++) key[i] = keys.at(slot + 16 * i);
            for (int d = 0; d < dim; d += 32) {
                _tile_loadd(7, packed + d * QUERIES, 64);
                _tile_loadd(4, key[0] + d, step);
                _tile_dpbf16ps(0, 4, 7);
                if (num > 1) { _tile_loadd(5, key[1] + d, step); _tile_dpbf16ps(1, 5, 7); }
                if (num > 2) { _tile_loadd(6, key[2] + d, step); _tile_dpbf16ps(2, 6, 7); }
                if (num > 3) { _tile_loadd(4, key[3] + d, step); _tile_dpbf16ps(3, 4, 7); }
            }
            _tile_stored(0, at(slot), 64);
            _tile_stored(1, at(slot + 16), 64);
            _tile_stored(2, at(slot + 32), 64);
            _tile_stored(3, at(slot + 48), 64);
            written();
            if (cap > 0)
                for (int i = slot; i < std::min(slot + 64, last); i++) store(at(i), cap * tanh(scale * load(at(i)) / cap));
            const int end = std::min(slot + 64, committed);
            int i = std::max(slot, sight.latest);
            for (; i + 4 <= end; i += 4)
                for (int j = 0; j < 4; j++) found[j] = max(found[j], load(at(i + j)));
            for (; i < end; i++) found[0] = max(found[0], load(at(i)));
        }
        V most = max(max(found[0], found[1]), max(found[2], found[3]));
        const auto compare = [&](int slot, __mmask16 who) {
            most = (V)_mm512_mask_max_ps((__m512)most, who, (__m512)most, (__m512)load(at(slot)));
        };
        for (int slot = sight.first; slot < std::min(sight.latest, committed); slot++) compare(slot, sight.who_sees(slot));
        for (int slot : sight.branch) compare(slot, sight.who_sees_new(slot));
        top = most;
    }
    // weights = e^(score - largest), 0 where the slot is not seen. What all queries leave to tiles is packed for them at once.
    void weigh(const Sight& sight, float scale) {
        const int committed = sight.committed, latest = sight.latest;
        first = sight.first;
        scale *= LOG2_E;
        const V highest = top * scale;
        V sum = splat(0);
        const auto soften = [&](int slot) { return exp2(load(at(slot)) * scale - highest); };
        const auto hidden = [&](int slot) { return (V)_mm512_maskz_mov_ps(sight.who_sees(slot), (__m512)soften(slot)); };
        const int whole = std::min(sight.lowest, committed) / 32 * 32;
        rows.grow(size_t(std::max(sight.old - first, 0)) * QUERIES);
        const auto pair = [&](int slot, V even, V odd) {
            sum += even;
            sum += odd;
            next_keys.bring_one(), next_values.bring_one();
            pack_pair(slot, even, odd);
        };
        int slot = first;
        for (; slot < std::min(latest, whole); slot += 2) pair(slot, hidden(slot), hidden(slot + 1));
        for (; slot < whole; slot += 2) pair(slot, soften(slot), soften(slot + 1));
        for (; slot < committed; slot++) {
            const V weight = slot < latest ? hidden(slot) : soften(slot);
            store(at(slot), weight);
            sum += weight;
        }
        for (int slot = committed; slot < std::min(sight.old, sight.last); slot++)
            if (!sight.who_sees_new(slot)) store(at(slot), splat(0));
        for (int slot : sight.branch) {
            const V weight = (V)_mm512_maskz_mov_ps(sight.who_sees_new(slot), (__m512)soften(slot));
            store(at(slot), weight);
            sum += weight;
        }
        total = sum;
        for (slot = std::max(whole, first); slot < sight.old; slot += 32) pack_weights(sight, slot);
    }
    // sums[dim][query] over the slots left to the tiles
    void blend_old(const Sight& sight) {
        const int old = sight.old;
        if (old <= first) {
            memset(sums_, 0, size_t(QUERIES) * dim * 4);
            return;
        }
        written();
        for (int d = 0; d < dim; d += 64) {
            const bool is_wide = d + 32 < dim;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int slot = first; slot < old; slot += 32) {
                const bf16* from = values.tile(slot, d);
                _tile_loadd(4, rows.data() + size_t(slot - first) * QUERIES, 64);
                _tile_loadd(5, from, 64);
                _tile_dpbf16ps(0, 5, 4);
                _tile_loadd(6, from + 512, 64);
                _tile_dpbf16ps(1, 6, 4);
                if (!is_wide) continue;
                _tile_loadd(7, from + 1024, 64);
                _tile_dpbf16ps(2, 7, 4);
                _tile_loadd(5, from + 1536, 64);
                _tile_dpbf16ps(3, 5, 4);
            }
            float* to = sums_ + d * QUERIES;
            _tile_stored(0, to, 64);
            _tile_stored(1, to + 256, 64);
            if (!is_wide) continue;
            _tile_stored(2, to + 512, 64);
            _tile_stored(3, to + 768, 64);
        }
        written();
    }
    // Weights of 32 slots as a tile, [slot pair][query][2]
    void pack_pair(int slot, V even, V odd) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        _mm512_storeu_si512(rows.data() + size_t(slot - first) * QUERIES, _mm512_permutexvar_epi16(in_turn(), both));
    }
    // What a query blends itself is zero there, and what it does not, here.
    void pack_weights(const Sight& sight, int slot) {
        const __mmask16 is_old = _mm512_cmpgt_epi32_mask((__m512i)sight.limits, _mm512_set1_epi32(slot));
        for (int s = slot; s < slot + 32; s += 2) {
            pack_pair(s, (V)_mm512_maskz_load_ps(is_old, at(s)), (V)_mm512_maskz_load_ps(is_old, at(s + 1)));
        }
        for (int s = std::max(slot, sight.lowest); s < slot + 32; s++) _mm512_mask_store_ps(at(s), is_old, _mm512_setzero_ps());
    }
    // Recent slots in order of position, on top of the sums of the old ones: a tree's slots come after their parents.
    void blend_recent(const Sight& sight) {
        for (int d = 0; d < dim; d += 16) {
            V acc[16];
            for (int i = 0; i < 16; i++) acc[i] = load(sums_ + (d + i) * QUERIES);
            const auto add = [&](int slot) {
                const V weight = load(at(slot));
                const float* value = values.line(slot) + d;
                for (int i = 0; i < 16; i++) acc[i] += weight * value[i];
            };
            for (int slot = sight.lowest; slot < sight.committed; slot++) add(slot);
            for (int slot : sight.branch)
                if (slot >= sight.lowest) add(slot);
            for (int i = 0; i < 16; i++) store(sums_ + (d + i) * QUERIES, acc[i]);
        }
    }
    void put(const Queries& queries, Inputs<bf16>& out) {
        const V inverse = 1.0f / total;
        for (int d = 0; d < dim; d += 32) {
            __m512i block[16];
            for (int pair = 0; pair < 16; pair++) {
                const float* from = sums_ + (d + 2 * pair) * QUERIES;
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)(load(from + QUERIES) * inverse), (__m512)(load(from) * inverse));
                block[pair] = _mm512_permutexvar_epi16(in_turn(), both);
            }
            transpose(block);
            for (int q = 0, row = queries.row; q < queries.count; row++) {
                const auto line = out.line(row);
                for (int column = queries.column + d, end = q + queries.per_row; q < end; q++, column += dim)
                    _mm512_storeu_si512(line.at(column), block[q]);
            }
        }
    }

    Memory<float> weights;
    Memory<bf16> rows;
    int first = 0;
    V top, total;
    alignas(64) float sums_[QUERIES * MAX_DIM];
    alignas(64) bf16 packed[MAX_DIM * QUERIES];
};
