// One pass of a decoder over the nodes of B trees, from tokens to logits: the twin of decoder.py.
//
// A pass is a fixed sequence of phases that a few threads go through together; the residual stream is float32, matrices
// and cache are bfloat16 or float32. Only real nodes are computed (no padding). Nothing is allocated per layer.
#pragma once
#include "attention_tiles.hpp"
#include "model.hpp"
#include "pool.hpp"

static thread_local int this_thread = 0;

struct Row {
    int batch, node, slot, position, out;  // out: index of the row in what is returned
    std::vector<int32_t> ancestors;        // slots of the nodes it sees, itself last
};

template <class T> struct Buffers {  // kept between passes
    std::vector<float> residual, wide;
    Inputs<T> narrow, gated, last;
    std::vector<std::vector<float>> spaces;
};

template <class T> class Runner {
  public:
    Runner(const Model& model, const Pass& pass, Buffers<T>& buffers) : m(model), p(pass), b(buffers), pool(Pool::of(pass.num_threads)) {}

    void run() {
        list_rows();
        if (rows.empty()) return;
        grow(b.residual, rows.size() * m.hidden);
        grow(b.wide, rows.size() * std::max((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden));
        b.narrow.reshape(int(rows.size()), std::max(m.hidden, m.heads * m.head_dim));
        b.gated.reshape(int(rows.size()), m.mlp);
        b.last.reshape(int(speaking.size()), m.hidden);
        b.spaces.resize(pool.size());
        score_stride = up(longest + p.nodes, LANES);
        counters = std::vector<std::atomic<int>>(size_t(16) * (p.last_layer - p.first_layer + 2) * pool.size());
        pool.run([this](int thread) { work(thread); });
    }

  private:
    void list_rows() {
        const int per_row = p.nodes - p.start;
        for (int batch = 0; batch < p.batch; batch++) {
            longest = std::max(longest, int(p.lengths[batch]));
            const int64_t* parents = p.parents ? p.parents + size_t(batch) * p.nodes : nullptr;
            for (int node = p.start; node < p.sizes[batch]; node++) {
                Row row{batch, node, p.lengths[batch] + node, 0, batch * per_row + node - p.start, {}};
                for (int at = node; at >= 0; at = parents ? int(parents[at]) : at - 1) row.ancestors.push_back(p.lengths[batch] + at);
                std::reverse(row.ancestors.begin(), row.ancestors.end());
                row.position = p.lengths[batch] + int(row.ancestors.size()) - 1;
                rows.push_back(std::move(row));
                if (!p.last_only || node == p.sizes[batch] - 1) speaking.push_back(int(rows.size()) - 1);
                const int together = std::max(1, 16 / (m.heads / m.kv_heads));
                if (tiles.empty() || rows[tiles.back().first].batch != batch || tiles.back().second - tiles.back().first == together)
                    tiles.emplace_back(int(rows.size()) - 1, int(rows.size()));
                else tiles.back().second++;
            }
        }
        // A head's tiles stay together unless there are too few pieces for the threads.
        const int num_parts = up(4 * pool.size(), m.kv_heads * p.batch) / (m.kv_heads * p.batch);
        for (int begin = 0, end = 0; begin < int(tiles.size()); begin = end) {
            while (end < int(tiles.size()) && rows[tiles[end].first].batch == rows[tiles[begin].first].batch) end++;
            const int count = end - begin, parts = std::min(count, num_parts);
            for (int part = 0; part < parts; part++) spans.emplace_back(begin + count * part / parts, begin + count * (part + 1) / parts);
        }
    }
    template <class B> static void grow(B& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    }
    float* wide(int row) { return b.wide.data() + size_t(row) * ((m.heads + 2 * m.kv_heads) * m.head_dim); }
    float* residual(int row) { return b.residual.data() + size_t(row) * m.hidden; }

    // Pieces 0 .. count - 1 of this phase: every thread has a run of them, and helps the others when it is done. Then all meet.
    template <class F> void share(int& phase, int count, F piece) {
        const int num_threads = pool.size();
        std::atomic<int>* taken = &counters[size_t(phase++) * num_threads];
        for (int turn = 0; turn < num_threads; turn++) {
            const int owner = (this_thread + turn) % num_threads, begin = count * owner / num_threads;
            const int size = count * (owner + 1) / num_threads - begin;
            for (int i; (i = taken[owner].fetch_add(1, std::memory_order_relaxed)) < size;) piece(begin + i);
        }
        pool.meet(this_thread);
    }
    // One piece is a few blocks of w for all rows: its weights are read from memory once.
    template <class F> void product(int& phase, const Matrix& w, Inputs<T>& x, F take) { product(phase, w, x, int(rows.size()), take); }
    template <class F> void product(int& phase, const Matrix& w, Inputs<T>& x, int num_rows, F take) {
        const int step = together<T>(num_rows);
        share(phase, up(w.num_blocks(), step) / step, [&](int piece) {
            const int first = piece * step, from = first * BLOCK, num_blocks = std::min(step, w.num_blocks() - first);
            alignas(64) float sums[MOST_ROWS * GROUP * BLOCK];
            for (int row = 0; row < num_rows; row += MOST_ROWS) {
                const int num = std::min(MOST_ROWS, num_rows - row), wide = together<T>(num) * BLOCK;
                multiply_group<T>(num, x.group(row), x.stride, w, first, num_blocks, sums);
                const int count = std::min(num_blocks * BLOCK, w.out - from);
                for (int r = 0; r < num; r++) {
                    float* out = sums + r * wide;
                    if (w.bias)
                        for (int j = 0; j < count; j++) out[j] += w.bias[from + j];
                    take(row + r, from, count, out);
                }
            }
        });
    }
    float rms(const float* x, int size) const {
        V squares = {};
        float rest = 0;
        int i = 0;
        for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
        for (; i < size; i++) rest += x[i] * x[i];
        return 1.0f / std::sqrt((sum(squares) + rest) / size + m.norm_eps);
    }
    static void put(float* to, const float* from, int size) { memcpy(to, from, size_t(size) * 4); }
    static void put(bf16* to, const float* from, int size) {
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(to + i, load(from + i));
        for (; i < size; i++) to[i] = to_bf16(from[i]);
    }
    void norm(int& phase, const float* weight, Inputs<T>& to, const std::vector<int>* chosen = nullptr) {
        share(phase, int(chosen ? chosen->size() : rows.size()), [&](int row) {
            const float *x = residual(chosen ? (*chosen)[row] : row), scale = rms(x, m.hidden);
            int i = 0;
            for (; i + LANES <= m.hidden; i += LANES) to.put(row, i, load(x + i) * scale * load(weight + i));
            if (i < m.hidden) {
                float part[LANES];
                for (int j = i; j < m.hidden; j++) part[j - i] = x[j] * scale * weight[j];
                put(to.at(row, i), part, m.hidden - i);
            }
            to.clear(row, m.hidden);
        });
    }
    void embed(int& phase) {
        share(phase, int(rows.size()), [&](int r) {
            float* to = residual(r);
            const Row& row = rows[r];
            if (p.first_layer > 0) {
                memcpy(to, p.hidden + size_t(row.out) * m.hidden, size_t(m.hidden) * 4);
                return;
            }
            const T* from = static_cast<const T*>(m.embedding) + size_t(p.tokens[size_t(row.batch) * p.nodes + row.node]) * m.hidden;
            for (int i = 0; i < m.hidden; i++) to[i] = value(from[i]) * m.embedding_scale;
        });
    }
    static float value(float x) { return x; }
    static float value(bf16 x) { return to_float(x); }

    void head_norm(float* x, const float* weight) const {
        const float scale = rms(x, m.head_dim);
        for (int i = 0; i < m.head_dim; i++) x[i] = x[i] * scale * weight[i];
    }
    void rotate(float* x, const float* cos, const float* sin) const {
        const int half = m.head_dim / 2;
        for (int i = 0; i < half; i++) {
            const float low = x[i], high = x[i + half];
            x[i] = low * cos[i] + high * sin[i];
            x[i + half] = high * cos[i + half] + low * sin[i + half];
        }
    }
    T* slot(int layer, int which, const Row& row, int head) {
        const size_t per_head = size_t(p.capacity) * m.head_dim;
        const size_t index = ((size_t(layer) * 2 + which) * p.cache_rows + row.batch) * m.kv_heads + head;
        return static_cast<T*>(p.cache) + index * per_head;
    }
    void attention(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim;
        norm(phase, w.attention_norm, b.narrow);
        product(phase, w.qkv, b.narrow, [&](int row, int from, int count, const float* sums) {
            memcpy(wide(row) + from, sums, size_t(count) * 4);
        });
        share(phase, int(rows.size()), [&](int r) {  // rotate, and write keys and values
            float* x = wide(r);
            const Row& row = rows[r];
            for (int head = 0; head < m.heads + m.kv_heads; head++) {
                float* at = x + head * dim;
                if (w.q_norm) head_norm(at, head < m.heads ? w.q_norm : w.k_norm);
                if (w.rope >= 0) rotate(at, p.cosines[w.rope] + size_t(row.position) * dim, p.sines[w.rope] + size_t(row.position) * dim);
            }
            for (int head = 0; head < m.kv_heads; head++)
                for (int which = 0; which < 2; which++)
                    put(slot(index, which, row, head) + size_t(row.slot) * dim, x + (m.heads + which * m.kv_heads + head) * dim, dim);
        });
        look(phase, index, thread);
        add_product(phase, w.out, b.narrow, w.attention_post_norm);
    }
    // narrow = what each query saw
    void look(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim, group = m.heads / m.kv_heads;
#if defined(__AMX_BF16__)
        if constexpr (sizeof(T) == 2) {
            if (dim % 32 == 0 && dim <= MAX_DIM && group <= QUERIES) return look_with_tiles(phase, index);
        }
#endif
        auto& space = b.spaces[thread];
        grow(space, size_t(MAX_TOGETHER) * score_stride + size_t(group) * dim);
        float* seen = space.data() + size_t(MAX_TOGETHER) * score_stride;
        share(phase, int(rows.size()) * m.kv_heads, [&](int piece) {
            const int r = piece / m.kv_heads, head = piece % m.kv_heads;
            attend(past_of(w, index, rows[r], head), wide(r) + size_t(head) * group * dim, group,
                   m.query_scale, m.attention_cap, space.data(), score_stride, seen);
            for (int i = 0; i < group * dim; i += LANES) b.narrow.put(r, head * group * dim + i, load(seen + i));
            if (head == m.kv_heads - 1) b.narrow.clear(r, m.heads * dim);
        });
    }
#if defined(__AMX_BF16__)
    // One piece is a key head and some of the tiles of a tree, which share the head's packed values.
    void look_with_tiles(int& phase, int index) {
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim, group = m.heads / m.kv_heads, num_spans = int(spans.size());
        share(phase, num_spans * m.kv_heads, [&](int piece) {
            static thread_local QueryTile tile;
            const int head = piece / num_spans;
            const auto [begin, end] = spans[piece % num_spans];
            const Row& one = rows[tiles[begin].first];
            int first = one.slot, old = 0;
            for (int r = tiles[begin].first; r < tiles[end - 1].second; r++) {
                first = std::min(first, past_of(w, index, rows[r], head).begin), old = std::max(old, blended(rows[r]));
            }
            tile.values.pack(slot(index, 1, one, head), dim, first / 32 * 32, old);
            for (int t = begin; t < end; t++) {
                tile.count = 0;
                for (int r = tiles[t].first; r < tiles[t].second; r++) {
                    const Past<T> past = past_of(w, index, rows[r], head);
                    for (int at = head * group * dim, g = 0; g < group; g++, at += dim)
                        tile.query[tile.count++] = {wide(r) + at, r, at, past, blended(rows[r])};
                    if (head == m.kv_heads - 1) b.narrow.clear(r, m.heads * dim);
                }
                tile.attend(dim, m.query_scale, m.attention_cap, b.narrow);
            }
        });
    }
    int blended(const Row& row) const {
        const int old = std::max(0, row.position + 1 - RECENT) / 32 * 32;
        return p.parents ? std::min(old, p.lengths[row.batch] / 32 * 32) : old;
    }
#endif
    Past<T> past_of(const LayerWeights& w, int index, const Row& row, int head) {
        const int origin = w.window && row.position + 1 > w.window ? row.position + 1 - w.window : 0;
        const int committed = p.lengths[row.batch], hidden = std::max(0, origin - committed);
        return {slot(index, 0, row, head), slot(index, 1, row, head), m.head_dim, std::min(origin, committed), committed,
                row.ancestors.data() + hidden, int(row.ancestors.size()) - hidden, origin};
    }
    void mlp(int& phase, const LayerWeights& w) {
        norm(phase, w.mlp_norm, b.narrow);
        product(phase, w.gate_up, b.narrow, [&](int row, int from, int count, float* sums) {
            for (int j = 0; j < count; j += 2 * BLOCK) {
                const V gated_sum = activated(load(sums + j)) * load(sums + j + BLOCK);
                b.gated.put(row, (from + j) / 2, gated_sum);
            }
            if (from + count == w.gate_up.out) b.gated.clear(row, w.gate_up.out / 2);
        });
        add_product(phase, w.down, b.gated, w.mlp_post_norm);
    }
    V activated(V x) const {
        if (m.activation == 0) return x / (1.0f + exp(-x));
        if (m.activation == 1) return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
        for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
        return x;
    }
    void add_product(int& phase, const Matrix& w, Inputs<T>& x, const float* post_norm) {
        product(phase, w, x, [&](int row, int from, int count, const float* sums) {
            float* to = (post_norm ? b.wide.data() + size_t(row) * m.hidden : residual(row)) + from;
            if (post_norm) memcpy(to, sums, size_t(count) * 4);
            else
                for (int j = 0; j < count; j++) to[j] += sums[j];
        });
        if (!post_norm) return;
        share(phase, int(rows.size()), [&](int row) {
            const float *from = b.wide.data() + size_t(row) * m.hidden, scale = rms(from, m.hidden);
            for (int i = 0; i < m.hidden; i++) residual(row)[i] += from[i] * scale * post_norm[i];
        });
    }
    void copy_out(int& phase, float* to) {
        share(phase, int(rows.size()), [&](int row) { memcpy(to + size_t(rows[row].out) * m.hidden, residual(row), size_t(m.hidden) * 4); });
    }
    void tap(int& phase, int layer) {
        for (int i = 0; i < p.num_taps; i++)
            if (p.tap_layers[i] == layer) copy_out(phase, p.taps[i]);
    }
    void work(int thread) {
        int phase = 0;
        this_thread = thread;
        embed(phase);
        for (int index = p.first_layer; index < p.last_layer; index++) {
            phase = 16 * (index - p.first_layer + 1);
            tap(phase, index);
            if (!p.attention_on || p.attention_on[index]) attention(phase, index, thread);
            if (!p.mlp_on || p.mlp_on[index]) mlp(phase, m.layer[index]);
        }
        phase = 16 * (p.last_layer - p.first_layer + 1);
        if (p.last_layer == m.layers) tap(phase, m.layers);
        if (p.hidden) copy_out(phase, p.hidden);
        if (p.logits) {
            norm(phase, m.norm, b.last, &speaking);
            product(phase, m.head, b.last, int(speaking.size()), [&](int row, int from, int count, const float* sums) {
                const Row& of = rows[speaking[row]];
                float* to = p.logits + size_t(p.last_only ? of.batch : of.out) * m.vocab + from;
                if (m.final_cap > 0)
                    for (int j = 0; j < count; j++) to[j] = m.final_cap * std::tanh(sums[j] / m.final_cap);
                else memcpy(to, sums, size_t(count) * 4);
            });
        }
        release_tiles();
    }

    const Model& m;
    const Pass& p;
    Buffers<T>& b;
    Pool& pool;
    std::vector<Row> rows;
    std::vector<int> speaking;  // rows whose logits are wanted
    std::vector<std::pair<int, int>> tiles;  // rows of one tree whose queries are looked at together
    std::vector<std::pair<int, int>> spans;  // tiles of one tree that are a piece of work
    std::vector<std::atomic<int>> counters;
    int score_stride = 0, longest = 0;
};
