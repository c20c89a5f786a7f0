// The nodes of a pass, one row each, and how they are grouped for attention.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "model.hpp"

struct Row {
    int batch, node, slot, position, out;  // out: index of the row in what is returned
    std::vector<int32_t> ancestors;        // slots of the nodes it sees, itself last
};

class RowList {
  public:
    std::vector<Row> rows;
    std::vector<int> speaking;               // rows whose logits are wanted
    std::vector<std::pair<int, int>> tiles;  // rows of one tree whose queries are looked at together
    std::vector<std::pair<int, int>> spans;  // tiles of one tree that are a piece of work
    std::vector<std::pair<int, int>> bands;  // as tiles, of more queries: vectors read keys once for all of them
    int longest = 0;                         // past
    int most_rows = 1, most_of_band = 1;     // of a tile, of a band

    RowList(const Model& m, const Pass& p, int num_threads) {
        const int per_row = p.nodes - p.start, together = std::max(1, 16 / (m.heads / m.kv_heads));
        for (int batch = 0; batch < p.batch; batch++) {
            longest = std::max(longest, int(p.lengths[batch]));
            const int64_t* parents = p.parents ? p.parents + size_t(batch) * p.nodes : nullptr;
            for (int node = p.start; node < p.sizes[batch]; node++) {
                Row row{batch, node, p.lengths[batch] + node, 0, batch * per_row + node - p.start, {}};
                for (int at = node; at >= 0; at = parents ? int(parents[at]) : at - 1) row.ancestors.push_back(p.lengths[batch] + at);
                std::reverse(row.ancestors.begin(), row.ancestors.end());
                row.position = p.lengths[batch] + int(row.ancestors.size()) - 1;
                rows.push_back(std::move(row));
                const bool is_read = p.num_spoken && batch >= p.num_spoken;
                if (!is_read && (!p.last_only || node == p.sizes[batch] - 1)) speaking.push_back(int(rows.size()) - 1);
                if (tiles.empty() || rows[tiles.back().first].batch != batch || tiles.back().second - tiles.back().first == together)
                    tiles.emplace_back(int(rows.size()) - 1, int(rows.size()));
                else tiles.back().second++;
                most_rows = std::max(most_rows, tiles.back().second - tiles.back().first);
            }
        }
        // A band has 64 queries, or fewer so that each thread has two pieces; what a row finds does not depend on it
        const int group = m.heads / m.kv_heads, num_queries = int(rows.size()) * m.heads;
        const int band = std::max(1, (num_threads == 1 ? 64 : std::clamp(num_queries / (2 * num_threads), 16, 64)) / group);
        for (int row = 0; row < int(rows.size()); row++) {
            if (bands.empty() || rows[bands.back().first].batch != rows[row].batch || row - bands.back().first == band) bands.emplace_back(row, row + 1);
            else bands.back().second++;
            most_of_band = std::max(most_of_band, bands.back().second - bands.back().first);
        }
        // A head's tiles stay together unless there are too few pieces for the threads.
        const int num_parts = up(4 * num_threads, m.kv_heads * p.batch) / (m.kv_heads * p.batch);
        for (int begin = 0, end = 0; begin < int(tiles.size()); begin = end) {
            while (end < int(tiles.size()) && rows[tiles[end].first].batch == rows[tiles[begin].first].batch) end++;
            const int count = end - begin, parts = std::min(count, num_parts);
            for (int part = 0; part < parts; part++) spans.emplace_back(begin + count * part / parts, begin + count * (part + 1) / parts);
        }
    }
};
