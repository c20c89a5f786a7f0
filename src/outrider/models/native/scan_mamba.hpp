// The tree scan of a Mamba-2 layer. The twin of models/recurrent/mamba_scan.py. A projection is [gate | x B C | dt].
#pragma once
#include "scan.hpp"

class MambaScan final : public ScanPass {
  public:
    explicit MambaScan(const Scan& scan) : MambaScan(scan, scan.heads * scan.head_dim, scan.groups * scan.state_size) {}

  private:
    MambaScan(const Scan& scan, int inner, int keys)
        : ScanPass(scan, inner, keys, {2 * inner + 2 * keys + scan.heads, inner, 0, inner, inner + keys}),
          scores(size_t(s.batch) * fresh * s.groups * most) {}

    float* score(int b, int i, int g) { return scores.data() + ((size_t(b) * fresh + i) * s.groups + g) * most; }

    void step(int b, int i) override {
        const float *mix = mixture(b, i), *times = projection(b, i) + inner + channels;
        float* col = node_column(b, i);
        memcpy(key(col, 0), mix + at.keys, sizeof(float) * keys_size);
        for (int h = 0; h < s.heads; h++) {
            const float t = std::min(std::max(softplus(times[h] + s.time_bias[h]), s.low), s.high);
            *decay(col, h) = t * s.rate[h];
            for (int p = 0; p < s.head_dim; p++) value(col, h)[p] = t * mix[h * s.head_dim + p];
        }
    }

    // All heads of a group share these.
    void compare(int b, int i) override {
        for (int g = 0; g < s.groups; g++)
            ScanPass::compare(b, i, g, mixture(b, i) + at.queries + g * s.state_size, score(b, i, g));
    }

    void read(int b, int h) override {
        const int g = h / (s.heads / s.groups);
        const Clock clock = this->clock(b, h);
        std::vector<float> known(size_t(fresh) * s.head_dim), left(most + LANES);
        for (int p = 0; p < s.head_dim; p++)
            for (int i = 0; i < fresh; i++)
                known[i * s.head_dim + p] = dot(state(b, h) + size_t(p) * s.state_size, mixture(b, i) + at.queries + g * s.state_size);
        std::vector<const float*> from(most);
        for (int i = 0; i < fresh; i++) {
            const int count = num_columns(b, i);
            fade(b, i, clock, left.data());
            for (int j = 0; j < count; j++) left[j] *= score(b, i, g)[j], from[j] = value(seen_column(b, i, j), h);
            const float kept = float(std::exp(clock.at[s.start + i]));
            const float* x = mixture(b, i) + h * s.head_dim;
            for (int p = 0; p < s.head_dim; p += LANES) {
                V sum = load(known.data() + size_t(i) * s.head_dim + p) * kept + load(x + p) * s.skip[h];
                for (int j = 0; j < count; j++) sum = sum + load(from[j] + p) * left[j];
                store(output(b, i, h) + p, sum);
            }
        }
    }

    std::vector<float> scores;
};
