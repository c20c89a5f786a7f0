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
    int row, column;  // where what it saw goes
    Past<bf16> past;
    int blended;  // slots below `blended` are left to the tiles
};

// Sixteen rows of sixteen words become columns.
static inline void transpose(__m512i* v) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            const __m512i a = v[8 * half + i], b = v[8 * half + i + 4];
            t[8 * half + i] = _mm512_shuffle_i32x4(a, b, 0x88), t[8 * half + i + 4] = _mm512_shuffle_i32x4(a, b, 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// The values of one key head from slot `first` on, as tiles want them: [32 slots][16 dimensions][slot pair][dimension][2].
class PackedValues {
  public:
    void pack(const bf16* values, int dim, int begin, int end) {
        first = begin, width = dim;
        if (end > begin && tiles.size() < size_t(end - begin) * dim + 32) tiles.resize(size_t(end - begin) * dim + 32);
        alignas(64) uint16_t low[32], high[32];
        for (int i = 0; i < 32; i++) low[i] = uint16_t(i / 2 + i % 2 * 32), high[i] = uint16_t(low[i] + 16);
        const __m512i lower = _mm512_load_si512(low), upper = _mm512_load_si512(high);
        for (int slot = begin; slot < end; slot += 2)
            for (int d = 0; d < dim; d += 32) {
                const __m512i even = _mm512_loadu_si512(values + size_t(slot) * dim + d), odd = _mm512_loadu_si512(values + size_t(slot + 1) * dim + d);
                bf16* to = at(slot / 32 * 32, d) + (slot % 32) * 16;
                _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, lower, odd));
                _mm512_storeu_si512(to + 512, _mm512_permutex2var_epi16(even, upper, odd));
            }
    }
    bf16* at(int slot, int d) { return tiles.data() + size_t(slot - first) * width + d * 32; }

  private:
    std::vector<bf16> tiles;
    int first = 0, width = 0;
};

class QueryTile {
  public:
    Query query[QUERIES];
    int count = 0;
    PackedValues values;  // of all slots below the largest `blended`

    void attend(int head_dim, float scale, float cap, Inputs<bf16>& out) {
        dim = head_dim;
        measure();
        shape_tiles(16);
        pack_queries();
        written();
        score(scale, cap);
        weigh(cap > 0 ? 1.0f : scale);
        blend_old();
        for (int q = 0; q < count; q += 4) {
            switch (std::min(4, count - q)) {
                case 4: blend_recent<4>(q); break;
                case 3: blend_recent<3>(q); break;
                case 2: blend_recent<2>(q); break;
                default: blend_recent<1>(q);
            }
        }
        for (int q = 0; q < count; q++) {
            const float inverse = 1.0f / total[q];
            const auto line = out.line(query[q].row);
            for (int d = 0; d < dim; d += LANES) line.put(query[q].column + d, load(sums_ + q * dim + d) * inverse);
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
        if (space.size() < size_t(up(last, 64)) * QUERIES + 16) space.resize(size_t(up(last, 64)) * QUERIES + 16);
        weights = reinterpret_cast<float*>((uintptr_t(space.data()) + 63) & ~uintptr_t(63));
        seen.assign(last - committed, 0);
        for (int q = 0; q < count; q++)
            for (int i = 0; i < query[q].past.num_ancestors; i++) seen[query[q].past.ancestors[i] - committed] |= 1 << q;
    }
    void pack_queries() {  // [dim / 2][query][2]
        __m512i block[QUERIES];
        for (int d = 0; d < dim; d += 32) {
            for (int q = 0; q < QUERIES; q++) {
                block[q] = q < count ? (__m512i)_mm512_cvtne2ps_pbh((__m512)load(query[q].from + d + 16), (__m512)load(query[q].from + d))
                                     : _mm512_setzero_si512();
            }
            transpose(block);
            for (int pair = 0; pair < 16; pair++) _mm512_store_si512(packed + (d / 2 + pair) * 32, block[pair]);
        }
    }
    // weights[slot][query] = query . key; -inf where the key is not seen
    void score(float scale, float cap) {
        const bf16* keys = query[0].past.keys;
        for (int slot = first; slot < last; slot += 64) {
            const int num = std::min(4, (last - slot + 15) / 16), step = dim * 2;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int d = 0; d < dim; d += 32) {
                const bf16* at = keys + size_t(slot) * dim + d;
                _tile_loadd(7, packed + d * QUERIES, 64);
                _tile_loadd(4, at, step);
                _tile_dpbf16ps(0, 4, 7);
                if (num > 1) { _tile_loadd(5, at + 16 * dim, step); _tile_dpbf16ps(1, 5, 7); }
                if (num > 2) { _tile_loadd(6, at + 32 * dim, step); _tile_dpbf16ps(2, 6, 7); }
                if (num > 3) { _tile_loadd(4, at + 48 * dim, step); _tile_dpbf16ps(3, 4, 7); }
            }
            float* to = weights + size_t(slot) * QUERIES;
            _tile_stored(0, to, 64);
            _tile_stored(1, to + 256, 64);
            _tile_stored(2, to + 512, 64);
            _tile_stored(3, to + 768, 64);
        }
        written();
        if (cap > 0)
            for (int slot = first; slot < last; slot++) change(slot, [&](V s) { return cap * tanh(scale * s / cap); });
        hide();
        V found[4];  // each a chain of comparisons
        for (V& one : found) one = splat(-1e30f);
        const int whole = first + (committed - first) / 4 * 4;
        for (int slot = first; slot < whole; slot += 4)
            for (int i = 0; i < 4; i++) found[i] = max(found[i], load(weights + size_t(slot + i) * QUERIES));
        for (int slot = whole; slot < committed; slot++) found[0] = max(found[0], load(weights + size_t(slot) * QUERIES));
        for (int slot : branch) found[1] = max(found[1], load(weights + size_t(slot) * QUERIES));
        most = max(max(found[0], found[1]), max(found[2], found[3]));
    }
    template <class F> void change(int slot, F f) { store(weights + size_t(slot) * QUERIES, f(load(weights + size_t(slot) * QUERIES))); }
    void hide() {
        I begins = {}, lane;
        for (int q = 0; q < count; q++) begins[q] = query[q].past.begin;
        for (int q = 0; q < QUERIES; q++) lane[q] = 1 << q;
        int latest = 0;
        for (int q = 0; q < count; q++) latest = std::max(latest, query[q].past.begin);
        for (int slot = first; slot < std::min(latest, committed); slot++)
            change(slot, [&](V s) { return select(begins <= slot, s, splat(-INFINITY)); });
        branch.clear();
        for (int slot = committed; slot < last; slot++) {
            const int who = seen[slot - committed];
            if (who) branch.push_back(slot);
            change(slot, [&](V s) { return who ? select((lane & who) != 0, s, splat(-INFINITY)) : splat(0); });
        }
    }
    void weigh(float scale) {
        total = splat(0);
        const V top = most * scale;
        const auto soften = [&](int slot) {
            const V weight = exp(load(weights + size_t(slot) * QUERIES) * scale - top);
            store(weights + size_t(slot) * QUERIES, weight);
            total += weight;
        };
        for (int slot = first; slot < committed; slot++) soften(slot);
        for (int slot : branch) soften(slot);
    }
    // sums[query][dim] over the slots left to the tiles
    void blend_old() {
        if (old <= first) {
            memset(sums_, 0, size_t(QUERIES) * dim * 4);
            return;
        }
        if (rows.size() < size_t(old - first) * QUERIES + 32) rows.resize(size_t(old - first) * QUERIES + 32);
        for (int slot = first; slot < old; slot += 32) pack_weights(slot);
        written();
        for (int d = 0; d < dim; d += 64) {
            const bool is_wide = d + 32 < dim;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int slot = first; slot < old; slot += 32) {
                const bf16* from = values.at(slot, d);
                _tile_loadd(4, rows.data() + size_t(slot - first) * QUERIES, 64);
                _tile_loadd(5, from, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, from + 512, 64);
                _tile_dpbf16ps(1, 4, 6);
                if (!is_wide) continue;
                _tile_loadd(7, from + 1024, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, from + 1536, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            _tile_stored(0, sums_ + d, dim * 4);
            _tile_stored(1, sums_ + d + 16, dim * 4);
            if (!is_wide) continue;
            _tile_stored(2, sums_ + d + 32, dim * 4);
            _tile_stored(3, sums_ + d + 48, dim * 4);
        }
        written();
    }
    // Weights of 32 slots as rows of a tile, [query][slot]. A query that blends some of them itself has zeros there.
    void pack_weights(int slot) {
        __m512i block[16];
        I limit = {};
        for (int q = 0; q < count; q++) limit[q] = query[q].blended;
        alignas(64) uint16_t turns[32];
        for (int i = 0; i < 32; i++) turns[i] = uint16_t(i / 2 + i % 2 * 16);
        const __m512i in_turn = _mm512_load_si512(turns);
        for (int s = 0; s < 16; s++) {
            const __m512 even = (__m512)limited(slot + 2 * s, limit), odd = (__m512)limited(slot + 2 * s + 1, limit);
            block[s] = _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
        }
        transpose(block);
        for (int q = 0; q < QUERIES; q++) _mm512_storeu_si512(rows.data() + size_t(slot - first) * QUERIES + q * 32, block[q]);
    }
    V limited(int slot, I limit) const { return select(limit > slot, load(weights + size_t(slot) * QUERIES), splat(0)); }

    // Recent slots in order of position, on top of the sums of the old ones. Queries share what lies in order in the cache; heads
    // of one node share the rest too.
    template <int N> void blend_recent(int q) {
        int begin = 0, end = last;
        for (int n = 0; n < N; n++) {
            const Query& one = query[q + n];
            begin = std::max({begin, one.blended, one.past.begin});
            end = std::min(end, in_order(one.past));
        }
        end = std::max(begin, end);
        by_node<N>(q, 0, begin);
        add_all<N>(q, begin, end, [](int slot) { return slot; });
        by_node<N>(q, end, 1 << 30);
    }
    // Slots up to here are positions.
    int in_order(const Past<bf16>& past) const {
        if (past.origin > past.committed) return past.begin;
        int end = past.committed;
        for (int i = 0; i < past.num_ancestors && past.ancestors[i] == end; i++) end++;
        return end;
    }
    // The positions [begin, end), as far as their queries blend them themselves
    template <int N> void by_node(int q, int begin, int end) {
        if (N == 4 && query[q].row == query[q + 3].row) return of_node<4>(q, begin, end);
        for (int n = 0; n < N;) {
            const bool is_pair = n + 1 < N && query[q + n].row == query[q + n + 1].row;
            is_pair ? of_node<2>(q + n, begin, end) : of_node<1>(q + n, begin, end);
            n += is_pair ? 2 : 1;
        }
    }
    template <int N> void of_node(int q, int begin, int end) {
        const Past<bf16>& past = query[q].past;
        begin = std::max({begin, query[q].blended, past.origin}) - past.origin;
        add_all<N>(q, begin, std::min(end - past.origin, past.size()), [&](int i) { return past.slot(i); });
    }
    template <int N, class F> void add_all(int q, int begin, int end, F slot_of) {
        for (int d = 0; d < dim && begin < end; d += 64) {
            if (d + 32 < dim) add<N, 4>(q, d, begin, end, slot_of);
            else add<N, 2>(q, d, begin, end, slot_of);
        }
    }
    template <int N, int C, class F> void add(int q, int d, int begin, int end, F slot_of) {
        V acc[N][C];
        float* sums = sums_ + q * dim + d;
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) acc[n][c] = load(sums + n * dim + c * LANES);
        for (int i = begin; i < end; i++) {
            const int slot = slot_of(i);
            const bf16* value = query[q].past.values + size_t(slot) * dim + d;
            V part[C];
            for (int c = 0; c < C; c++) part[c] = load(value + c * LANES);
            for (int n = 0; n < N; n++)
                for (int c = 0; c < C; c++) acc[n][c] += weights[size_t(slot) * QUERIES + q + n] * part[c];
        }
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) store(sums + n * dim + c * LANES, acc[n][c]);
    }

    std::vector<float> space;
    std::vector<bf16> rows;
    std::vector<int32_t> seen;    // [slot] bit of each query that sees it
    std::vector<int32_t> branch;  // uncommitted slots that any query sees
    int dim = 0, committed = 0, first = 0, last = 0, old = 0;
    float* weights = nullptr;
    V most, total;
    alignas(64) float sums_[QUERIES * MAX_DIM];
    alignas(64) bf16 packed[MAX_DIM * QUERIES];
};
#endif
