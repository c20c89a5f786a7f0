// One pass of a decoder over the nodes of B trees, from tokens to logits, in one call: the twin of decoder.py.
//
// A pass is a fixed sequence of phases that a few threads go through together; the residual stream is float32, matrices
// and cache are bfloat16 or float32. Only real nodes are computed (no padding). Nothing is allocated per layer.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>

#include "attention_tiles.hpp"
#include "matmul.hpp"
#include "pool.hpp"
#include "tree.hpp"

extern "C" {
struct LayerWeights {
    Matrix qkv, out, gate_up, down;  // gate_up: 16 gates, their 16 ups, and so on
    const float *attention_norm, *mlp_norm, *attention_post_norm, *mlp_post_norm, *q_norm, *k_norm;  // null where absent
    int32_t rope, window;  // -1: no positions; 0: no window
};
struct Model {
    int32_t is_bf16, hidden, layers, heads, kv_heads, head_dim, mlp, vocab, activation, post_norms;
    float norm_eps, query_scale, embedding_scale, attention_cap, final_cap;
    const void* embedding;  // [vocab][hidden]
    const float* norm;
    Matrix head;
    const LayerWeights* layer;
};
struct Pass {
    int32_t batch, nodes, start, first_layer, last_layer, capacity, num_threads, num_taps;
    const int64_t* tokens;   // [batch][nodes]
    const int64_t* parents;  // [batch][nodes], null for chains
    const int32_t* sizes;    // [batch]
    const int32_t* lengths;  // [batch]
    void* cache;             // [layers][2][cache_rows][kv_heads][capacity][head_dim]
    const float* const* cosines;  // per rope: [positions][head_dim]
    const float* const* sines;
    const uint8_t *attention_on, *mlp_on;  // [layers] or null: all
    const int32_t* tap_layers;
    float* const* taps;      // [num_taps] of [batch][nodes - start][hidden]
    float* hidden;           // [batch][nodes - start][hidden] or null: in when first_layer > 0, out when not null
    float* logits;           // [batch][nodes - start][vocab] or null
    int32_t last_only;       // logits [batch][vocab] of each row's last node only
    int32_t cache_rows;      // at least batch
};
struct Chain {
    int32_t longest;
    const int32_t* depths;        // [batch] guesses wanted
    const float* temperatures;    // [batch]
    const int64_t *seeds, *positions;  // [batch] whose noise, and the output position of the first guess
    int64_t* guesses;             // [batch][longest]
};
}

static thread_local int this_thread = 0;
static constexpr int ROWS = 32;  // rows multiplied together

struct Row {
    int batch, node, slot, position, out;  // out: index of the row in what is returned
    std::vector<int32_t> ancestors;        // slots of the nodes it sees, itself last
};

struct Buffers {  // kept between passes
    std::vector<float> residual, wide;
    std::vector<uint8_t> narrow, gated;
    std::vector<std::vector<float>> spaces;
};

template <class T> class Runner {
  public:
    Runner(const Model& model, const Pass& pass, Buffers& buffers) : m(model), p(pass), b(buffers), pool(Pool::of(pass.num_threads)) {}

    void run() {
        list_rows();
        if (rows.empty()) return;
        num_padded = up(int(rows.size()), ROWS);
        const int widest = std::max({m.hidden, m.heads * m.head_dim, 32});
        grow(b.residual, size_t(num_padded) * m.hidden);
        grow(b.wide, size_t(num_padded) * std::max((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden));
        x_stride = spread(widest), gated_stride = spread(m.mlp);
        grow(b.narrow, size_t(num_padded) * x_stride * sizeof(T) + 64);
        grow(b.gated, size_t(num_padded) * gated_stride * sizeof(T) + 64);
        b.spaces.resize(pool.size());
        score_stride = up(longest + p.nodes, LANES);
        counters = std::vector<std::atomic<int>>(size_t(16) * (p.last_layer - p.first_layer + 2));
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
    }
    // An odd number of cache lines from row to row: rows a power of two apart would push each other out of the cache.
    static int spread(int width) { return up(width, 32) / 32 % 2 ? up(width, 32) : up(width, 32) + 32; }
    template <class B> static void grow(B& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    }
    T* narrow(int row) { return reinterpret_cast<T*>(b.narrow.data()) + size_t(row) * x_stride; }
    T* gated(int row) { return reinterpret_cast<T*>(b.gated.data()) + size_t(row) * gated_stride; }
    float* residual(int row) { return b.residual.data() + size_t(row) * m.hidden; }

    // Pieces 0 .. count - 1 of this phase, shared out; then everybody meets.
    template <class F> void share(int& phase, int count, F piece) {
        std::atomic<int>& counter = counters[phase++];
        for (int i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < count;) piece(i);
        pool.meet(this_thread);
    }
    // One piece is a run of blocks of w for all rows: its weights are read from memory once.
    template <class F> void product(int& phase, const Matrix& w, const T* x, int stride, F take) {
        product(phase, w, x, stride, int(rows.size()), take);
    }
    template <class F> void product(int& phase, const Matrix& w, const T* x, int stride, int num_rows, F take) {
        const int num_groups = up(w.num_blocks(), GROUP) / GROUP, num_pieces = std::min(num_groups, 6 * pool.size());
        share(phase, num_pieces, [&](int piece) {
            const int begin = num_groups * piece / num_pieces * GROUP;
            const int end = std::min(num_groups * (piece + 1) / num_pieces * GROUP, w.num_blocks()), step = together<T>(num_rows);
            for (int first = begin; first < end; first += step)
                for (int row = 0; row < num_rows; row += ROWS) {
                    const Part part = {row / ROWS, first + 2 * step <= end ? up(num_rows, ROWS) / ROWS : 0};
                    multiply_blocks(w, x, stride, {row, std::min(ROWS, num_rows - row)}, {first, std::min(step, end - first)}, part, take);
                }
        });
    }
    struct Span {
        int first, count;
    };
    template <class F> void multiply_blocks(const Matrix& w, const T* x, int stride, Span of, Span blocks, Part part, F take) {
        alignas(64) float sums[ROWS * GROUP * BLOCK];
        multiply_group<T>(of.count, x + size_t(of.first) * stride, stride, w, blocks.first, blocks.count, sums, part);
        const int from = blocks.first * BLOCK, count = std::min(blocks.count * BLOCK, w.out - from);
        for (int r = 0; r < of.count; r++) {
            float* out = sums + r * GROUP * BLOCK;
            if (w.bias)
                for (int j = 0; j < count; j++) out[j] += w.bias[from + j];
            take(of.first + r, from, count, out);
        }
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
    static void clear(T* row, int used) {  // what a product reads past the end
        for (int i = used; i < up(used, 32); i++) row[i] = T(0);
    }
    void norm_to_narrow(int& phase, const float* weight, const int* chosen = nullptr, int count = 0) {
        share(phase, chosen ? count : int(rows.size()), [&](int row) {
            const float *x = residual(chosen ? chosen[row] : row), scale = rms(x, m.hidden);
            T* to = narrow(row);
            float part[LANES];
            int i = 0;
            for (; i + LANES <= m.hidden; i += LANES) store(to + i, load(x + i) * scale * load(weight + i));
            if (i < m.hidden) {
                for (int j = i; j < m.hidden; j++) part[j - i] = x[j] * scale * weight[j];
                put(to + i, part, m.hidden - i);
            }
            clear(to, m.hidden);
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
        const int dim = m.head_dim, width = (m.heads + 2 * m.kv_heads) * dim;
        norm_to_narrow(phase, w.attention_norm);
        product(phase, w.qkv, narrow(0), x_stride, [&](int row, int from, int count, const float* sums) {
            memcpy(b.wide.data() + size_t(row) * width + from, sums, size_t(count) * 4);
        });
        share(phase, int(rows.size()), [&](int r) {  // rotate, and write keys and values
            float* x = b.wide.data() + size_t(r) * width;
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
        add_product(phase, w.out, narrow(0), x_stride, w.attention_post_norm);
    }
    // narrow = what each query saw
    void look(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim, width = (m.heads + 2 * m.kv_heads) * dim, group = m.heads / m.kv_heads;
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
            attend(past_of(w, index, rows[r], head), b.wide.data() + size_t(r) * width + size_t(head) * group * dim, group,
                   m.query_scale, m.attention_cap, space.data(), score_stride, seen);
            put(narrow(r) + size_t(head) * group * dim, seen, group * dim);
            if (head == m.kv_heads - 1) clear(narrow(r), m.heads * dim);
        });
    }
#if defined(__AMX_BF16__)
    void look_with_tiles(int& phase, int index) {
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim, width = (m.heads + 2 * m.kv_heads) * dim, group = m.heads / m.kv_heads;
        share(phase, int(tiles.size()) * m.kv_heads, [&](int piece) {
            static thread_local QueryTile tile;
            const int head = piece % m.kv_heads;
            tile.count = 0;
            for (int r = tiles[piece / m.kv_heads].first; r < tiles[piece / m.kv_heads].second; r++) {
                const Row& row = rows[r];
                int blended = std::max(0, row.position + 1 - RECENT) / 32 * 32;
                if (p.parents) blended = std::min(blended, p.lengths[row.batch] / 32 * 32);
                for (int g = 0; g < group; g++) {
                    const size_t at = size_t(head * group + g) * dim;
                    tile.query[tile.count++] = {b.wide.data() + size_t(r) * width + at, narrow(r) + at, past_of(w, index, row, head), blended};
                }
                if (head == m.kv_heads - 1) clear(narrow(r), m.heads * dim);
            }
            tile.attend(dim, m.query_scale, m.attention_cap);
        });
    }
#endif
    Past<T> past_of(const LayerWeights& w, int index, const Row& row, int head) {
        const int origin = w.window && row.position + 1 > w.window ? row.position + 1 - w.window : 0;
        const int committed = p.lengths[row.batch], hidden = std::max(0, origin - committed);
        return {slot(index, 0, row, head), slot(index, 1, row, head), m.head_dim, std::min(origin, committed), committed,
                row.ancestors.data() + hidden, int(row.ancestors.size()) - hidden, origin};
    }
    void mlp(int& phase, const LayerWeights& w) {
        norm_to_narrow(phase, w.mlp_norm);
        product(phase, w.gate_up, narrow(0), x_stride, [&](int row, int from, int count, float* sums) {
            for (int j = 0; j < count; j += 2 * BLOCK) {
                const V gated_sum = activated(load(sums + j)) * load(sums + j + BLOCK);
                store(gated(row) + (from + j) / 2, gated_sum);
            }
            if (from + count == w.gate_up.out) clear(gated(row), w.gate_up.out / 2);
        });
        add_product(phase, w.down, gated(0), gated_stride, w.mlp_post_norm);
    }
    V activated(V x) const {
        if (m.activation == 0) return x / (1.0f + exp(-x));
        if (m.activation == 1) return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
        for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
        return x;
    }
    void add_product(int& phase, const Matrix& w, const T* x, int stride, const float* post_norm) {
        product(phase, w, x, stride, [&](int row, int from, int count, const float* sums) {
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
            norm_to_narrow(phase, m.norm, speaking.data(), int(speaking.size()));
            product(phase, m.head, narrow(0), x_stride, int(speaking.size()), [&](int row, int from, int count, const float* sums) {
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
    Buffers& b;
    Pool& pool;
    std::vector<Row> rows;
    std::vector<int> speaking;  // rows whose logits are wanted
    std::vector<std::pair<int, int>> tiles;  // rows of one tree whose queries are looked at together
    std::vector<std::atomic<int>> counters;
    int num_padded = 0, x_stride = 0, gated_stride = 0, score_stride = 0, longest = 0;
};

static void run(const Model& model, const Pass& pass) {
    static Buffers* buffers = new Buffers;
    if (model.is_bf16) Runner<bf16>(model, pass, *buffers).run();
    else Runner<float>(model, pass, *buffers).run();
}

// One pass over nodes start .. nodes - 1 of trees kept in arrays of `most` nodes a row.
static void feed(const Model& model, Pass& pass, const std::vector<int64_t>& tokens, const std::vector<int64_t>& parents, int most) {
    std::vector<int64_t> fed, above;
    for (int b = 0; b < pass.batch; b++) {
        fed.insert(fed.end(), tokens.begin() + size_t(b) * most, tokens.begin() + size_t(b) * most + pass.nodes);
        above.insert(above.end(), parents.begin() + size_t(b) * most, parents.begin() + size_t(b) * most + pass.nodes);
    }
    pass.tokens = fed.data(), pass.parents = above.data();
    run(model, pass);
}

extern "C" {
// Asks the system for the tile registers; 0 if this machine or system has none and the code needs them.
int outrider_init() {
#if defined(__AMX_BF16__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
#else
    return 1;
#endif
}
void outrider_pack(void* to, const void* from, int out, int in, int is_bf16) {
#if defined(__linux__)  // weights are read from end to end: large pages spare the address tables
    const uintptr_t begin = (uintptr_t(to) + 4095) & ~uintptr_t(4095), end = uintptr_t(to) + size_t(up(out, BLOCK)) * up(in, 32) * (is_bf16 ? 2 : 4);
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    if (is_bf16) pack(static_cast<bf16*>(to), static_cast<const bf16*>(from), out, in);
    else pack(static_cast<float*>(to), static_cast<const float*>(from), out, in);
}
void outrider_gumbel(const int64_t* keys, int64_t count, int size, float* out) {
    for (int64_t i = 0; i < count; i++) gumbel_stream(uint64_t(keys[i]), size, out + i * size);
}
void outrider_pass(const Model* model, const Pass* pass) {
    std::lock_guard<std::mutex> only(Pool::lock());
    run(*model, *pass);
}
// Reads the tokens of `pass`, then guesses on by itself, feeding each guess but the last.
void outrider_chain(const Model* model, const Pass* pass, const Chain* chain) {
    std::lock_guard<std::mutex> only(Pool::lock());
    Pass now = *pass;
    std::vector<float> logits(size_t(now.batch) * model->vocab);
    std::vector<int32_t> lengths(now.lengths, now.lengths + now.batch), sizes(now.sizes, now.sizes + now.batch);
    std::vector<int64_t> fed(now.batch);
    now.last_only = 1, now.logits = logits.data(), now.lengths = lengths.data(), now.sizes = sizes.data();
    for (int step = 0; step < chain->longest; step++) {
        run(*model, now);
        for (int b = 0; b < now.batch; b++) {
            lengths[b] += sizes[b];
            if (step >= chain->depths[b]) { sizes[b] = 0; continue; }
            const uint64_t key = noise_key(chain->seeds[b], chain->positions[b] + step);
            fed[b] = choice(logits.data() + size_t(b) * model->vocab, model->vocab, chain->temperatures[b], key);
            chain->guesses[size_t(b) * chain->longest + step] = fed[b];
            sizes[b] = step + 1 < chain->depths[b];
        }
        now.nodes = 1, now.tokens = fed.data();
    }
}
// Reads the tokens of `pass`, then grows a tree behind them, level by level; what is fed after the root stays uncommitted.
void outrider_tree(const Model* model, const Pass* pass, const Tree* tree) {
    std::lock_guard<std::mutex> only(Pool::lock());
    Pass now = *pass;
    const int batch = now.batch, most = tree->longest * tree->width;  // nodes fed after the root
    std::vector<float> logits(size_t(batch) * std::max(1, tree->width) * model->vocab);
    std::vector<int32_t> lengths(now.lengths, now.lengths + batch), sizes(now.sizes, now.sizes + batch);
    std::vector<int64_t> tokens(size_t(batch) * most), parents(size_t(batch) * most);
    std::vector<RowGrowth> rows;
    for (int b = 0; b < batch; b++) rows.emplace_back(*tree, b);
    now.last_only = 1, now.logits = logits.data(), now.lengths = lengths.data(), now.sizes = sizes.data();
    run(*model, now);
    for (int b = 0; b < batch; b++) lengths[b] += sizes[b], sizes[b] = 0;
    now.last_only = 0;
    for (int depth = 0, fed = 0; depth < tree->longest; depth++) {
        const int stride = now.nodes - now.start;  // logits of a row
        int level = 0;
        for (int b = 0; b < batch; b++) {
            if (!rows[b].goes_on(depth)) { sizes[b] = 0; continue; }
            const size_t begin = rows[b].pool.size();
            rows[b].add(logits.data() + size_t(b) * (depth ? stride : 1) * model->vocab, model->vocab, depth);
            if (!rows[b].goes_on(depth + 1)) { sizes[b] = 0; continue; }
            int numbered = fed;
            rows[b].choose(begin, numbered);
            for (int place : rows[b].frontier) {
                const Candidate& one = rows[b].pool[place];
                tokens[size_t(b) * most + one.number - 1] = one.token;
                parents[size_t(b) * most + one.number - 1] = rows[b].pool[one.parent].number - 1;
            }
            sizes[b] = numbered, level = std::max(level, numbered - fed);
        }
        if (level == 0) break;
        now.start = fed, now.nodes = fed + level, fed += level;
        feed(*model, now, tokens, parents, most);
    }
    for (auto& row : rows) row.write();
}
}
