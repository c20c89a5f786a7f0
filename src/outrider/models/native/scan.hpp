// The tree scan of a Mamba-2 layer, between its two matrices. The twin of models/recurrent/mamba_scan.py, which has the
// formulas. A node's decays are summed along its parents, so a tree costs no more than its nodes. All sizes are multiples of 16.
#pragma once
#include <cmath>

#include "pool.hpp"
#include "vector.hpp"

extern "C" struct Scan {
    int32_t batch, nodes, start;      // nodes of the trees, and the first one that is computed
    int32_t heads, head_dim, groups, state_size, conv_len;
    int32_t begin, end;               // first column of the log, column of the root
    int32_t columns, numbers;         // of the log: per row, per column
    int32_t num_threads;
    float low, high;                  // bounds of a time step
    const float* projected;           // [batch][nodes - start][gate | x B C | dt]
    float* log;                       // [batch][columns][x B C | decays | keys | values]
    const float* state;               // [batch][heads][head_dim][state_size]
    const int64_t* parents;           // [batch][nodes]
    const float *weight, *bias;       // [conv_len][x B C], [x B C] or null
    const float *rate, *time_bias, *skip;  // [heads]
    float* out;                       // [batch][nodes - start][heads][head_dim]
};

class ScanPass {
  public:
    explicit ScanPass(const Scan& scan)
        : s(scan), pool(Pool::of(scan.num_threads)), fresh(s.nodes - s.start), inner(s.heads * s.head_dim),
          keys_size(s.groups * s.state_size), channels(inner + 2 * keys_size), width(inner + channels + s.heads),
          most(s.end - s.begin + s.nodes), mixed(size_t(s.batch) * fresh * channels),
          scores(size_t(s.batch) * fresh * s.groups * most), seen(size_t(s.batch) * fresh * s.nodes),
          num_seen(size_t(s.batch) * fresh) {}

    void run() {
        std::atomic<int> places[3] = {0, 0, 0};
        pool.run([&](int thread) {
            for (int i; (i = places[0].fetch_add(1)) < s.batch * fresh;) write_inputs(i / fresh, i % fresh);
            pool.meet(thread);
            for (int i; (i = places[1].fetch_add(1)) < s.batch * fresh;) convolve(i / fresh, i % fresh);
            pool.meet(thread);
            for (int i; (i = places[2].fetch_add(1)) < s.batch * fresh;) compare(i / fresh, i % fresh);
            pool.meet(thread);
            for (int i = thread; i < s.batch * s.heads; i += pool.active()) read(i / s.heads, i % s.heads);
        });
    }

  private:
    const float* projection(int b, int i) const { return s.projected + (size_t(b) * fresh + i) * width; }
    float* column(int b, int c) const { return s.log + (size_t(b) * s.columns + c) * s.numbers; }
    float* node_column(int b, int i) const { return column(b, s.end + s.start + i); }
    float* mixture(int b, int i) { return mixed.data() + (size_t(b) * fresh + i) * channels; }
    int parent(int b, int node) const { return int(s.parents[size_t(b) * s.nodes + node]); }

    void write_inputs(int b, int i) { memcpy(node_column(b, i), projection(b, i) + inner, sizeof(float) * channels); }

    float time(int b, int i, int head) const {
        const float x = projection(b, i)[inner + channels + head] + s.time_bias[head];
        return std::min(std::max(x > 20 ? x : std::log1p(std::exp(x)), s.low), s.high);
    }

    // The convolution along a node's ancestors, and what the node does to the state.
    void convolve(int b, int i) {
        std::vector<const float*> window(s.conv_len);
        for (int w = s.conv_len - 1, node = s.start + i; w >= 0; w--) {
            window[w] = column(b, s.end + node);
            node = node >= 0 ? parent(b, node) : node - 1;
        }
        float *mix = mixture(b, i), *col = node_column(b, i);
        for (int c = 0; c < channels; c += LANES) {
            V sum = s.bias ? load(s.bias + c) : splat(0.0f);
            for (int w = 0; w < s.conv_len; w++) sum = sum + load(window[w] + c) * load(s.weight + size_t(w) * channels + c);
            store(mix + c, sum / (1.0f + exp(-sum)));
        }
        memcpy(col + channels + s.heads, mix + inner, sizeof(float) * keys_size);
        float* values = col + channels + s.heads + keys_size;
        for (int h = 0; h < s.heads; h++) {
            const float t = time(b, i, h);
            col[channels + h] = t * s.rate[h];
            for (int p = 0; p < s.head_dim; p++) values[h * s.head_dim + p] = t * mix[h * s.head_dim + p];
        }
    }

    // Products of a node's queries with the keys of the log and of its ancestors, for all heads of a group.
    void compare(int b, int i) {
        const size_t place = size_t(b) * fresh + i;
        int count = 0;
        for (int node = s.start + i; node >= 0; node = parent(b, node)) seen[place * s.nodes + count++] = node;
        num_seen[place] = count;
        const int logged = s.end - s.begin;
        for (int g = 0; g < s.groups; g++) {
            const float* query = mixture(b, i) + inner + keys_size + g * s.state_size;
            float* to = scores.data() + (place * s.groups + g) * most;
            for (int j = 0; j < logged + count; j++) {
                const int c = j < logged ? s.begin + j : s.end + seen[place * s.nodes + j - logged];
                to[j] = dot(query, column(b, c) + channels + s.heads + g * s.state_size);
            }
        }
    }

    float dot(const float* x, const float* y) const {
        V sum = splat(0.0f);
        for (int k = 0; k < s.state_size; k += LANES) sum = sum + load(x + k) * load(y + k);
        return ::sum(sum);
    }

    // What all nodes of a row read in one head.
    void read(int b, int h) {
        const int logged = s.end - s.begin, g = h / (s.heads / s.groups), values = channels + s.heads + keys_size + h * s.head_dim;
        std::vector<double> before(logged + 1, 0.0), at(s.nodes);
        for (int j = 0; j < logged; j++) before[j + 1] = before[j] + column(b, s.begin + j)[channels + h];
        for (int n = 0; n < s.nodes; n++)
            at[n] = (parent(b, n) < 0 ? before[logged] : at[parent(b, n)]) + column(b, s.end + n)[channels + h];
        const float* state = s.state + (size_t(b) * s.heads + h) * s.head_dim * s.state_size;
        std::vector<float> known(size_t(fresh) * s.head_dim), left((most + LANES - 1) / LANES * LANES);
        for (int p = 0; p < s.head_dim; p++)
            for (int i = 0; i < fresh; i++)
                known[i * s.head_dim + p] = dot(state + size_t(p) * s.state_size, mixture(b, i) + inner + keys_size + g * s.state_size);
        std::vector<const float*> from(most);
        for (int i = 0; i < fresh; i++) {
            const size_t place = size_t(b) * fresh + i;
            const double now = at[s.start + i];
            const int count = logged + num_seen[place];
            for (int j = 0; j < count; j++) {
                const int node = j < logged ? 0 : seen[place * s.nodes + j - logged];
                left[j] = float(now - (j < logged ? before[j + 1] : at[node]));
                from[j] = column(b, j < logged ? s.begin + j : s.end + node) + values;
            }
            const float* score = scores.data() + (place * s.groups + g) * most;
            for (int j = 0; j < count; j += LANES) store(left.data() + j, exp(load(left.data() + j)));
            for (int j = 0; j < count; j++) left[j] *= score[j];
            const float fade = float(std::exp(now));
            const float* x = mixture(b, i) + h * s.head_dim;
            float* to = s.out + (place * s.heads + h) * s.head_dim;
            for (int p = 0; p < s.head_dim; p += LANES) {
                V sum = load(known.data() + size_t(i) * s.head_dim + p) * fade + load(x + p) * s.skip[h];
                for (int j = 0; j < count; j++) sum = sum + load(from[j] + p) * left[j];
                store(to + p, sum);
            }
        }
    }

    const Scan& s;
    Pool& pool;
    const int fresh, inner, keys_size, channels, width, most;
    std::vector<float> mixed, scores;
    std::vector<int32_t> seen, num_seen;
};
