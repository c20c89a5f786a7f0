// The attention of a layer with AMX tiles: heads, trees and their tiles of queries handed out as pieces of work.
#pragma once
#include <map>

#include "amx_attention.hpp"

template <> class TileLook<bf16> {
  public:
    static bool fits(const Model& m, const Pass& p) {
        return p.page_len % 32 == 0 && m.head_dim % 32 == 0 && m.head_dim <= MAX_DIM && m.heads / m.kv_heads <= QUERIES;
    }
    // Works out what is seen in the layers of a pass, once for every window.
    template <class R> void prepare(R& run) {
        for (int index = run.p.first_layer; index < run.p.last_layer && fits(run.m, run.p); index++)
            if (const int window = run.m.layer[index].window; !sights.contains(window)) sights[window] = sights_of(run, run.m.layer[index]);
    }
    // One piece is a key head and some of the tiles of a tree, which share the head's packed values.
    template <class R> void look(R& run, int& phase, int index) {
        const Model& m = run.m;
        const auto& spans = run.list.spans;
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim, group = m.heads / m.kv_heads, num_spans = int(spans.size());
        const std::vector<Sight>& sight = sights.at(w.window);
        run.share(phase, num_spans * m.kv_heads, [&](int piece) {
            static thread_local QueryTile tile;
            const int head = piece / num_spans;
            const auto [begin, end] = spans[piece % num_spans];
            const Reach reach = reach_of(run.list, sight, spans[piece % num_spans]);
            const Slots<bf16> keys = run.slots(index, 0, reach.batch, head), values = run.slots(index, 1, reach.batch, head);
            tile.next_keys = tile.next_values = {};
            if (const int after = piece + 1, next = after / num_spans; next < m.kv_heads) {
                const Reach then = reach_of(run.list, sight, spans[after % num_spans]);
                if (next != head || then.batch != reach.batch) {
                    tile.next_keys = PagesAhead(run.slots(index, 0, then.batch, next), then.first, then.last);
                    tile.next_values = PagesAhead(run.slots(index, 1, then.batch, next), then.first, then.last);
                }
            }
            tile.dim = dim;
            tile.values.pack(values, dim, reach.first, reach.old);
            tile.values.unpack(values, reach.lowest, reach.last);
            for (int t = begin; t < end; t++) {
                const auto [row, after] = run.list.tiles[t];
                const Queries queries{run.queries_of(head, row), (after - row) * group, group, row, head * group * dim};
                tile.attend(queries, sight[t], keys, m.query_scale, m.attention_cap, run.b.narrow);
                for (int r = row; r < after && head == m.kv_heads - 1; r++) run.b.narrow.clear(r, m.heads * dim);
            }
        });
    }

  private:
    struct Reach {  // the slots that some tiles of one tree look at
        int batch, first, last, old, lowest;
    };
    static Reach reach_of(const RowList& list, const std::vector<Sight>& sight, std::pair<int, int> span) {
        Reach reach{list.rows[list.tiles[span.first].first].batch, sight[span.first].first, 0, 0, sight[span.first].lowest};
        for (int t = span.first; t < span.second; t++) {
            reach.first = std::min(reach.first, sight[t].first), reach.last = std::max(reach.last, sight[t].last);
            reach.old = std::max(reach.old, sight[t].old), reach.lowest = std::min(reach.lowest, sight[t].lowest);
        }
        return reach;
    }
    // What each tile of queries sees in layers with this window
    template <class R> static std::vector<Sight> sights_of(R& run, const LayerWeights& w) {
        std::vector<Sight> found;
        for (const auto& [begin, end] : run.list.tiles) {
            const auto& rows = run.list.rows;
            Sight& sight = found.emplace_back(run.p.lengths[rows[begin].batch]);
            for (int r = begin; r < end; r++)
                sight.add(run.past_of(w, 0, rows[r], 0), blended(run.p, rows[r]), run.m.heads / run.m.kv_heads);
            sight.close();
        }
        return found;
    }
    static int blended(const Pass& p, const Row& row) {
        const int old = std::max(0, row.position + 1 - RECENT) / 32 * 32;
        return p.parents ? std::min(old, p.lengths[row.batch] / 32 * 32) : old;
    }
    std::map<int, std::vector<Sight>> sights;  // of the tiles, by window
};
