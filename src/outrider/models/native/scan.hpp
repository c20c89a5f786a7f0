// What recurrent layers share between their two matrices: convolution along ancestors, steps in the log, products with keys,
// decays. The twins of models/recurrent/scan.py, which has the formulas. A node's decays are summed along its parents, so a
// tree costs no more than its nodes. All sizes are multiples of 16.
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
    float low, high;                  // bounds of a time step (Mamba-2)
    const float* projected;           // [batch][nodes - start][what the first matrix gives]
    float* log;                       // [batch][columns][inputs of the convolution | decays | keys | values]
    const float* state;               // [batch][heads][head_dim][state_size]
    const int64_t* parents;           // [batch][nodes]
    const float *weight, *bias;       // of the convolution: [conv_len][channels], [channels] or null
    const float *rate, *time_bias;    // [heads]
    const float* skip;                // [heads] (Mamba-2)
    float* out;                       // [batch][nodes - start][heads][head_dim]
};

static inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

class ScanPass {
  public:
    virtual ~ScanPass() = default;
    void run() {
        std::atomic<int> places[3] = {0, 0, 0};
        pool.run([&](int thread) {
            for (int i; (i = places[0].fetch_add(1)) < s.batch * fresh;) write_inputs(i / fresh, i % fresh);
            pool.meet(thread);
            for (int i; (i = places[1].fetch_add(1)) < s.batch * fresh;) convolve(i / fresh, i % fresh), step(i / fresh, i % fresh);
            pool.meet(thread);
            for (int i; (i = places[2].fetch_add(1)) < s.batch * fresh;) walk(i / fresh, i % fresh), compare(i / fresh, i % fresh);
            pool.meet(thread);
            for (int i = thread; i < s.batch * s.heads; i += pool.active()) read(i / s.heads, i % s.heads);
        });
    }

  protected:
    // Where a family has its parts: the channels' inputs in a projection of `width`, values, keys and queries among the channels.
    struct Places { int width, inputs, values, keys, queries; };

    ScanPass(const Scan& scan, int inner, int keys_size, Places places)
        : s(scan), pool(Pool::of(scan.num_threads)), fresh(s.nodes - s.start), inner(inner), keys_size(keys_size),
          channels(inner + 2 * keys_size), most(s.end - s.begin + s.nodes), at(places), mixed(size_t(s.batch) * fresh * channels),
          seen(size_t(s.batch) * fresh * s.nodes), num_seen(size_t(s.batch) * fresh) {}

    // What a node does to the state, from what the convolution left; written to its column.
    virtual void step(int b, int i) = 0;
    // Products of a node's vectors with keys.
    virtual void compare(int b, int i) = 0;
    // What all nodes of a row read in one head.
    virtual void read(int b, int h) = 0;

    const float* projection(int b, int i) const { return s.projected + (size_t(b) * fresh + i) * at.width; }
    float* column(int b, int c) const { return s.log + (size_t(b) * s.columns + c) * s.numbers; }
    float* node_column(int b, int i) const { return column(b, s.end + s.start + i); }
    float* mixture(int b, int i) { return mixed.data() + (size_t(b) * fresh + i) * channels; }
    float* decay(float* column, int h) const { return column + channels + h; }
    float* key(float* column, int g) const { return column + channels + s.heads + g * s.state_size; }
    float* value(float* column, int h) const { return column + channels + s.heads + keys_size + h * s.head_dim; }
    float* output(int b, int i, int h) const { return s.out + ((size_t(b) * fresh + i) * s.heads + h) * s.head_dim; }
    const float* state(int b, int h) const { return s.state + (size_t(b) * s.heads + h) * s.head_dim * s.state_size; }
    int parent(int b, int node) const { return int(s.parents[size_t(b) * s.nodes + node]); }
    int logged() const { return s.end - s.begin; }
    // Columns that a node sees: the log, the node itself, its parent, and so on up.
    int num_columns(int b, int i) const { return logged() + num_seen[size_t(b) * fresh + i]; }
    int seen_node(int b, int i, int j) const { return seen[(size_t(b) * fresh + i) * s.nodes + j - logged()]; }
    float* seen_column(int b, int i, int j) const { return column(b, j < logged() ? s.begin + j : s.end + seen_node(b, i, j)); }

    float dot(const float* x, const float* y) const {
        V sum = splat(0.0f);
        for (int k = 0; k < s.state_size; k += LANES) sum = sum + load(x + k) * load(y + k);
        return ::sum(sum);
    }
    // [columns] products of a vector with the keys that a node sees.
    void compare(int b, int i, int g, const float* vector, float* to) const {
        for (int j = 0; j < num_columns(b, i); j++) to[j] = dot(vector, key(seen_column(b, i, j), g));
    }

    // Sums of one head's decays: on the way to every column of the log, and to every node.
    struct Clock { std::vector<double> before, at; };
    Clock clock(int b, int h) const {
        Clock found{std::vector<double>(logged() + 1, 0.0), std::vector<double>(s.nodes)};
        for (int j = 0; j < logged(); j++) found.before[j + 1] = found.before[j] + *decay(column(b, s.begin + j), h);
        for (int n = 0; n < s.nodes; n++)
            found.at[n] = (parent(b, n) < 0 ? found.before[logged()] : found.at[parent(b, n)]) + *decay(column(b, s.end + n), h);
        return found;
    }
    // [columns] how much of every column is left at a node. Room is needed for a whole vector more.
    void fade(int b, int i, const Clock& clock, float* left) const {
        const int count = num_columns(b, i);
        const double now = clock.at[s.start + i];
        for (int j = 0; j < count; j++) left[j] = float(now - (j < logged() ? clock.before[j + 1] : clock.at[seen_node(b, i, j)]));
        for (int j = 0; j < count; j += LANES) store(left + j, exp(load(left + j)));
    }

    const Scan& s;
    Pool& pool;
    const int fresh, inner, keys_size, channels, most;
    const Places at;
    std::vector<float> mixed;

  private:
    void write_inputs(int b, int i) { memcpy(node_column(b, i), projection(b, i) + at.inputs, sizeof(float) * channels); }

    void convolve(int b, int i) {
        std::vector<const float*> window(s.conv_len);
        for (int w = s.conv_len - 1, node = s.start + i; w >= 0; w--) {
            window[w] = column(b, s.end + node);
            node = node >= 0 ? parent(b, node) : node - 1;
        }
        float* mix = mixture(b, i);
        for (int c = 0; c < channels; c += LANES) {
            V sum = s.bias ? load(s.bias + c) : splat(0.0f);
            for (int w = 0; w < s.conv_len; w++) sum = sum + load(window[w] + c) * load(s.weight + size_t(w) * channels + c);
            store(mix + c, sum / (1.0f + exp(-sum)));
        }
    }

    void walk(int b, int i) {
        int count = 0;
        int32_t* to = seen.data() + (size_t(b) * fresh + i) * s.nodes;
        for (int node = s.start + i; node >= 0; node = parent(b, node)) to[count++] = node;
        num_seen[size_t(b) * fresh + i] = count;
    }

    std::vector<int32_t> seen, num_seen;
};
