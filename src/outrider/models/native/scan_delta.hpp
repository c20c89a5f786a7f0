// The tree scan of a gated delta layer. The twin of models/recurrent/delta_scan.py. A projection is [q k v | gate | b | a]. A
// node writes what the state of its path does not hold yet, so the nodes of a head go one after the other, parents first.
#pragma once
#include "scan.hpp"

class DeltaScan final : public ScanPass {
  public:
    explicit DeltaScan(const Scan& scan) : DeltaScan(scan, scan.heads * scan.head_dim, scan.groups * scan.state_size) {}

  private:
    DeltaScan(const Scan& scan, int inner, int keys)
        : ScanPass(scan, inner, keys, {2 * inner + 2 * keys + 2 * scan.heads, 0, 2 * keys, keys, 0}),
          scores(size_t(s.batch) * fresh * s.groups * 2 * most) {}

    // Products of queries (0) and of keys (1).
    float* score(int b, int i, int g, int which) {
        return scores.data() + (((size_t(b) * fresh + i) * s.groups + g) * 2 + which) * most;
    }

    void step(int b, int i) override {
        float *mix = mixture(b, i), *col = node_column(b, i);
        const float* times = projection(b, i) + channels + inner + s.heads;
        for (int g = 0; g < s.groups; g++) {
            lengthen(mix + at.queries + g * s.state_size, 1 / std::sqrt(float(s.state_size)));
            lengthen(mix + at.keys + g * s.state_size, 1);
        }
        memcpy(key(col, 0), mix + at.keys, sizeof(float) * keys_size);
        for (int h = 0; h < s.heads; h++) *decay(col, h) = s.rate[h] * softplus(times[h] + s.time_bias[h]);
    }

    void lengthen(float* vector, float length) const {
        const float by = length / std::sqrt(dot(vector, vector) + 1e-6f);
        for (int k = 0; k < s.state_size; k += LANES) store(vector + k, load(vector + k) * by);
    }

    void compare(int b, int i) override {
        for (int g = 0; g < s.groups; g++) {
            ScanPass::compare(b, i, g, mixture(b, i) + at.queries + g * s.state_size, score(b, i, g, 0));
            ScanPass::compare(b, i, g, mixture(b, i) + at.keys + g * s.state_size, score(b, i, g, 1));
        }
    }

    void read(int b, int h) override {
        const int g = h / (s.heads / s.groups), size = s.head_dim;
        const Clock clock = this->clock(b, h);
        std::vector<float> held(size_t(2) * fresh * size), left(most + LANES), of_query(most), of_key(most);
        for (int p = 0; p < size; p++)
            for (int i = 0; i < fresh; i++) {
                const float *row = state(b, h) + size_t(p) * s.state_size, *mix = mixture(b, i) + g * s.state_size;
                held[(2 * i) * size + p] = dot(row, mix + at.queries);
                held[(2 * i + 1) * size + p] = dot(row, mix + at.keys);
            }
        std::vector<float*> from(most);
        for (int i = 0; i < fresh; i++) {
            const int count = num_columns(b, i), own = logged();
            fade(b, i, clock, left.data());
            for (int j = 0; j < count; j++) {
                of_query[j] = left[j] * score(b, i, g, 0)[j], of_key[j] = left[j] * score(b, i, g, 1)[j];
                from[j] = value(seen_column(b, i, j), h);
            }
            const float kept = float(std::exp(clock.at[s.start + i]));
            const float moved = 1 / (1 + std::exp(-projection(b, i)[channels + inner + h]));
            const float *query_held = held.data() + size_t(2 * i) * size, *key_held = query_held + size;
            for (int p = 0; p < size; p += LANES) {
                V known = load(key_held + p) * kept, sum = load(query_held + p) * kept;
                for (int j = 0; j < count; j++) {
                    if (j == own) continue;
                    const V there = load(from[j] + p);
                    known = known + there * of_key[j], sum = sum + there * of_query[j];
                }
                const V written = (load(mixture(b, i) + at.values + h * size + p) - known) * moved;
                store(from[own] + p, written);
                store(output(b, i, h) + p, sum + written * of_query[own]);
            }
        }
    }

    std::vector<float> scores;
};
