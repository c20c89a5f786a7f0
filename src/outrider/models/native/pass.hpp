// One pass of a decoder over the nodes of B trees, from tokens to logits: the twin of decoder.py.
//
// A pass is a fixed sequence of phases that a few threads go through together; the residual stream is float32, matrices
// and cache are bfloat16 or float32. Only real nodes are computed (no padding). Nothing is allocated per layer.
#pragma once
#include <bit>
#include <optional>

#include "attention.hpp"
#include "in_place.hpp"
#include "isa/tile_look.hpp"
#include "matmul.hpp"
#include "pool.hpp"
#include "rows.hpp"
#include "stages.hpp"
#include "stored.hpp"

static thread_local int this_thread = 0;

constexpr int64_t BACK = int64_t(1) << 32;  // one piece taken from the back of a run
constexpr int CHUNK = 16;  // rows that are rotated at once

template <class T> struct Buffers {  // kept between passes
    Memory<float> residual, wide;
    Inputs<T> narrow, gated, last;
    RoundedRows rounded;  // what goes into a product with a stored matrix
    Memory<T> queries;
    std::vector<std::vector<float>> spaces;
};

struct Sums {  // of some rows and a few blocks: what a product found
    float* at;
    int rows, wide;
    float* operator()(int row) const { return at + row * wide; }
};
template <class T> struct Product {
    const Matrix &w, &then;  // then: what is read next
    Inputs<T>& x;
    int rows;  // of x
};

static inline float value(float x) { return x; }
static inline float value(bf16 x) { return to_float(x); }
// What enters the first layer
template <class T> static void put_embedding(const Model& m, int64_t token, float* to) {
    const T* from = static_cast<const T*>(m.embedding) + size_t(token) * m.hidden;
    if (m.embedding_type >= HALF)
        widen_row(m.embedding, token, m.embedding_type, m.hidden, to);
    else if (m.embedding_type)
        with_type(m.embedding_type, [&]<class W>() {
            dequantise<W>(static_cast<const uint8_t*>(m.embedding) + size_t(token) * (m.hidden / W::WIDTH) * W::FILE_BYTES, m.hidden, to);
        });
    else for (int i = 0; i < m.hidden; i++) to[i] = value(from[i]);
    for (int i = 0; i < m.hidden; i++) to[i] *= m.embedding_scale;
}

template <class T> class Runner {
  public:
    Runner(const Model& model, const Pass& pass, Buffers<T>& buffers)
        : m(model), p(pass), b(buffers), pool(Pool::of(pass.num_threads)), list(m, p, pool.size()) {}

    void run() {
        if (rows.empty()) return;
        b.residual.grow(rows.size() * m.hidden);
        b.wide.grow(rows.size() * std::max((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden));
        b.narrow.reshape(int(rows.size()), std::max(m.hidden, m.heads * m.head_dim));
        b.gated.reshape(int(rows.size()), m.mlp);
        b.last.reshape(int(speaking.size()), m.hidden);
        if (m.has_stored) b.rounded.reshape(int(rows.size()), std::max({m.hidden, m.heads * m.head_dim, m.mlp}));
        b.spaces.resize(pool.size());
        b.queries.grow(has_tile_attention() ? rows.size() * m.heads * m.head_dim : 0);
        tile_look.prepare(*this);
        score_stride = up(list.longest + p.nodes, LANES) + LANES;
        counters = std::vector<std::atomic<int64_t>>(size_t(16) * (p.last_layer - p.first_layer + 2) * pool.size());
        pool.run([this](int thread) { work(thread); });
    }

  private:
    friend class TileLook<T>;
    template <class B> static void grow(B& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    }
    // The queries of a key head, its key and its value at one row. Outputs of qkv come in this order too (packed_model.py), so that a
    // thread finds in its own cache what it needs for the attention of a head.
    float* heads_of(int head, int row) { return b.wide.data() + (size_t(head) * rows.size() + row) * per_head(); }
    T* queries_of(int head, int row) { return b.queries.data() + (size_t(head) * rows.size() + row) * (m.heads / m.kv_heads) * m.head_dim; }
    // Outputs of a head come with those that they are rotated with, sixteen and sixteen, where that can be.
    int column_of(int output) const {
        const int within = output % per_head(), dim = m.head_dim, block = within % dim / BLOCK;
        return dim % (2 * BLOCK) ? within : within / dim * dim + block / 2 * BLOCK + block % 2 * (dim / 2);
    }
    int per_head() const { return (m.heads / m.kv_heads + 2) * m.head_dim; }
    float* residual(int row) { return b.residual.data() + size_t(row) * m.hidden; }

    // Pieces 0 .. count - 1 of this phase: every thread has a run of them, and helps the others when it is done. Then all meet.
    template <class F> void share(int& phase, int count, F piece) {
        share(phase, count, piece, [] {});
    }
    template <class F, class L> void share(int& phase, int count, F piece, L at_last) {
        const int num_threads = pool.size();
        const Stage stage(this_thread, phase, p.last_layer - p.first_layer);
        std::atomic<int64_t>* taken = &counters[size_t(phase++) * num_threads];
        for (int turn = 0; turn < num_threads; turn++) {
            const int owner = (this_thread + turn) % num_threads, begin = count * owner / num_threads;
            const int size = count * (owner + 1) / num_threads - begin;
            for (;;) {  // the owner takes from the front, the others from the back: what each fetches ahead stays its own
                const int64_t was = taken[owner].fetch_add(turn ? BACK : 1, std::memory_order_relaxed);
                const int front = int(was % BACK), back = int(was / BACK);
                if (front + back >= size) break;
                piece(begin + (turn ? size - 1 - back : front));
            }
        }
        at_last();
        pool.meet(this_thread);
    }
    // Results that are written while the next are multiplied, a row or a few at a time.
    template <class P> struct Results {
        const Matrix& w;
        int at_once;
        Sums sums{};
        int from = 0, count = 0, done = 0;
        std::optional<P> put{};  // (row of sums, what was found there)
        void operator()() { write(at_once); }
        void write(int most) {
            for (const int end = std::min(sums.rows, done + most); done < end; done++) {
                float* found = sums(done);
                if (w.scales || w.bias) finish(w, from, count, found);
                (*put)(done, found);
            }
        }
    };
    template <class F> void product(int& phase, const Product<T>& of, F take) {
        if (of.w.is_stored == IN_PLACE) return product_of<InPlace<T>>(phase, of, take);
        if constexpr (sizeof(T) == 2) {
            if (of.w.scales) return product_of<int8_t>(phase, of, take);
        } else {
            if (of.w.is_stored == IN_HALF) return product_of<half>(phase, of, take);
            if (of.w.is_stored == IN_BRAIN) return product_of<bf16>(phase, of, take);
            if (of.w.is_stored) return round(phase, of), product_of<AnyStored>(phase, of, take);
        }
        product_of<T>(phase, of, take);
    }
    void round(int& phase, const Product<T>& of) {
        share(phase, of.rows, [&](int row) { b.rounded.round(row, of.x.at(row, 0), of.w.in); });
    }
    template <class W> auto group_of(const Product<T>& of, int row) {
        if constexpr (is_stored<W>) return b.rounded.group(row);
        else return Group<T>{of.x.group(row), of.x.stride};
    }
    // One piece is a few blocks of w for all rows: its weights are read from memory once. take(row, from, count) gives what puts
    // outputs [from, from + count) of rows from `row` on in their place.
    template <class W, class F> void product_of(int& phase, const Product<T>& of, const F& take) {
        const Matrix& w = of.w;
        const int step = together<T>(of.rows), count = up(w.num_blocks(), step) / step;
        const int own = count * this_thread / pool.size(), last = count * (this_thread + 1) / pool.size() - 1;  // this thread's
        const int begin_then = up(of.then.num_blocks(), step) / step * this_thread / pool.size() * step;
        alignas(64) float sums[2][MOST_ROWS * GROUP * BLOCK];
        int turn = 0;
        Results<decltype(take(0, 0, 0))> results{w, up(MOST_ROWS * 16, w.padded_in()) / w.padded_in()};  // all, in two goes over the inputs
        share(phase, count, [&](int piece) {
            const int first = piece * step, num_blocks = std::min(step, w.num_blocks() - first);
            const bool is_own = piece >= own && piece <= last;
            const auto next = piece == last ? Blocks<W>::of(of.then, begin_then)
                                            : Blocks<W>::of(w, is_own ? first + step : std::max(0, first - step));
            for (int row = 0; row < of.rows; row += MOST_ROWS) {
                const int num = std::min(MOST_ROWS, of.rows - row);
                const Sums found{sums[turn ^= 1], num, together<T>(num) * BLOCK};
                multiply_group(num, group_of<W>(of, row), Blocks<W>::of(w, first), num_blocks, next, found.at, results);
                results.write(MOST_ROWS);
                results.sums = found, results.from = first * BLOCK, results.done = 0;
                results.count = std::min(num_blocks * BLOCK, w.out - results.from);
                results.put.emplace(take(row, results.from, results.count));
                if (num <= MOST_ROWS / 2) results.write(MOST_ROWS);  // so few are multiplied without a chore
            }
        }, [&] { results.write(MOST_ROWS); });
    }
    static void finish(const Matrix& w, int from, int count, float* at) {
        if (w.scales)
            for (int j = 0; j < count; j++) at[j] *= w.scales[from + j];
        if (w.bias)
            for (int j = 0; j < count; j++) at[j] += w.bias[from + j];
    }
    float rms(const float* x, int size) const {
        V squares[4] = {};
        float rest = 0;
        int i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES)
            for (int j = 0; j < 4; j++) squares[j] += load(x + i + j * LANES) * load(x + i + j * LANES);
        for (; i + LANES <= size; i += LANES) squares[0] += load(x + i) * load(x + i);
        for (; i < size; i++) rest += x[i] * x[i];
        return 1.0f / std::sqrt((sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest) / size + m.norm_eps);
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
            const auto line = to.line(row);
            int i = 0;
            for (; i + LANES <= m.hidden; i += LANES) line.put(i, load(x + i) * scale * load(weight + i));
            for (; i < m.hidden; i++) Inputs<T>::write(line.at(i), x[i] * scale * weight[i]);
            to.clear(row, m.hidden);
        });
    }
    void embed(int& phase) {
        share(phase, int(rows.size()), [&](int r) {
            float* to = residual(r);
            const Row& row = rows[r];
            if (p.first_layer > 0 || !m.embedding) {
                memcpy(to, p.hidden + size_t(row.out) * m.hidden, size_t(m.hidden) * 4);
                return;
            }
            put_embedding<T>(m, p.tokens[size_t(row.batch) * p.nodes + row.node], to);
        });
    }
    void head_norm(float* x, const float* weight) const {
        const float scale = rms(x, m.head_dim);
        for (int i = 0; i < m.head_dim; i++) x[i] = x[i] * scale * weight[i];
    }
    static void turn(V& low, V& high, const float* cos, const float* sin, int half) {
        const V was = low;
        low = was * load(cos) + high * load(sin);
        high = high * load(cos + half) + was * load(sin + half);
    }
    void rotate(float* x, const float* cos, const float* sin) const {
        const int half = m.head_dim / 2;
        int i = 0;
        for (; i + LANES <= half; i += LANES) {
            V low = load(x + i), high = load(x + i + half);
            turn(low, high, cos + i, sin + i, half);
            store(x + i, low), store(x + i + half, high);
        }
        for (; i < half; i++) {
            const float low = x[i], high = x[i + half];
            x[i] = low * cos[i] + high * sin[i];
            x[i + half] = high * cos[i + half] + low * sin[i + half];
        }
    }
    Slots<T> slots(int layer, int which, int batch, int head) const {
        const size_t per_head = size_t(p.page_len) * m.head_dim, index = (size_t(layer) * 2 + which) * p.num_pages * m.kv_heads + head;
        T* first = static_cast<T*>(p.cache) + index * per_head;
        return {first, p.pages + size_t(batch) * p.columns, m.kv_heads * per_head, page_bits, m.head_dim};
    }
    void attention(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
        norm(phase, w.attention_norm, b.narrow);
        const bool is_direct = has_tile_attention() && !w.q_norm;
        product(phase, {w.qkv, w.out, b.narrow, int(rows.size())}, [&](int row, int from, int count) {
            const HeadPart parts[2] = {part_of(from), part_of(from + 2 * BLOCK)};
            float* to[GROUP];
            for (int i = 0; i < GROUP; i++) to[i] = heads_of((from + i * BLOCK) / per_head(), row) + column_of(from + i * BLOCK);
            return [=, this, &w](int r, const float* found) {
                if (is_direct)
                    for (int j = 0; j < count; j += 2 * BLOCK) place_pair(w, index, parts[j / (2 * BLOCK)], row + r, found + j);
                else
                    for (int j = 0; j < count; j += BLOCK) store(to[j / BLOCK] + size_t(r) * per_head(), load(found + j));
            };
        });
        const int num_chunks = up(int(rows.size()), CHUNK) / CHUNK;
        if (!is_direct) {
            share(phase, m.kv_heads * num_chunks, [&](int piece) {
                const int head = piece / num_chunks, first = piece % num_chunks * CHUNK;
                for (int r = first; r < std::min(first + CHUNK, int(rows.size())); r++) place(w, index, head, r);
            });
        }
        look(phase, index, thread);
        add_product(phase, {w.out, w.gate_up, b.narrow, int(rows.size())}, w.attention_post_norm);
    }
    struct HeadPart {
        int head, part, column;  // part: one of the queries, the key, the value
    };
    HeadPart part_of(int output) const {
        return {output / per_head(), output % per_head() / m.head_dim, column_of(output) % m.head_dim};
    }
    // What a product found of two blocks that are rotated together: rotated, and written where attention finds it.
    void place_pair(const LayerWeights& w, int index, HeadPart of, int r, const float* found) {
        const int dim = m.head_dim, half = dim / 2, group = m.heads / m.kv_heads;
        const Row& row = rows[r];
        const size_t angle = size_t(row.position) * dim + of.column;
        V low = load(found), high = load(found + BLOCK);
        if (of.part <= group && w.rope >= 0) turn(low, high, p.cosines[w.rope] + angle, p.sines[w.rope] + angle, half);
        T* to = of.part < group ? queries_of(of.head, r) + of.part * dim
                                : slots(index, of.part - group, row.batch, of.head).at(row.slot);
        store(to + of.column, low), store(to + of.column + half, high);
    }
    // The same for one head at one row, where more than rotation has to be done first.
    void place(const LayerWeights& w, int index, int head, int r) {
        const int dim = m.head_dim, group = m.heads / m.kv_heads;
        const Row& row = rows[r];
        float* x = heads_of(head, r);
        for (int i = 0; i <= group; i++) {
            float* at = x + i * dim;
            if (w.q_norm) head_norm(at, i < group ? w.q_norm : w.k_norm);
            if (w.rope >= 0) rotate(at, p.cosines[w.rope] + size_t(row.position) * dim, p.sines[w.rope] + size_t(row.position) * dim);
        }
        if (has_tile_attention()) put(queries_of(head, r), x, group * dim);
        for (int which = 0; which < 2; which++)
            put(slots(index, which, row.batch, head).at(row.slot), x + (group + which) * dim, dim);
    }
    bool has_tile_attention() const { return TileLook<T>::fits(m, p); }
    // narrow = what each query saw
    void look(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim, group = m.heads / m.kv_heads;
        if (has_tile_attention()) return tile_look.look(*this, phase, index);
        const int most = list.most_rows * group;
        std::vector<const float*> queries;
        auto& space = b.spaces[thread];
        grow(space, size_t(most) * (score_stride + dim));
        float* seen = space.data() + size_t(most) * score_stride;
        share(phase, int(list.tiles.size()) * m.kv_heads, [&](int piece) {
            const auto [first, last] = list.tiles[piece / m.kv_heads];
            const int head = piece % m.kv_heads;
            Past<T> pasts[16];
            queries.resize(size_t(last - first) * group);
            for (int r = first; r < last; r++) {
                pasts[r - first] = past_of(w, index, rows[r], head);
                for (int i = 0; i < group; i++) queries[(r - first) * group + i] = heads_of(head, r) + i * dim;
            }
            for (int h = 0; h < group; h += MOST_LOOKING) {  // a tile has several rows only where these are all heads
                const int heads = std::min(MOST_LOOKING, group - h);
                attend<T>({pasts, queries.data() + h, last - first, heads}, m.query_scale, m.attention_cap, space.data(), score_stride, seen + size_t(h) * dim);
            }
            for (int r = first; r < last; r++) {
                const float* from = seen + size_t(r - first) * group * dim;
                for (int i = 0; i < group * dim; i += LANES) b.narrow.put(r, head * group * dim + i, load(from + i));
                if (head == m.kv_heads - 1) b.narrow.clear(r, m.heads * dim);
            }
        });
    }
    Past<T> past_of(const LayerWeights& w, int index, const Row& row, int head) {
        const int origin = w.window && row.position + 1 > w.window ? row.position + 1 - w.window : 0;
        const int committed = p.lengths[row.batch], hidden = std::max(0, origin - committed);
        return {slots(index, 0, row.batch, head), slots(index, 1, row.batch, head), m.head_dim, std::min(origin, committed), committed,
                row.ancestors.data() + hidden, int(row.ancestors.size()) - hidden, origin};
    }
    void mlp(int& phase, const LayerWeights& w, const Matrix& then) {
        norm(phase, w.mlp_norm, b.narrow);
        product(phase, {w.gate_up, w.down, b.narrow, int(rows.size())}, [&](int row, int from, int count) {
            auto* to = b.gated.at(row, from / 2);
            const bool is_last = from + count == w.gate_up.out;
            return [=, this, &w](int r, const float* found) {
                for (int j = 0; j < count; j += 2 * BLOCK)
                    Inputs<T>::write(to + size_t(r) * b.gated.step() + j / 2, activated(load(found + j)) * load(found + j + BLOCK));
                if (is_last) b.gated.clear(row + r, w.gate_up.out / 2);
            };
        });
        add_product(phase, {w.down, then, b.gated, int(rows.size())}, w.mlp_post_norm);
    }
    V activated(V x) const {
        if (m.activation == 0) return x * inverse(1.0f + exp_of_minus<T>(x));
        if (m.activation == 1) return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
        float lanes[LANES];
        store(lanes, x);
        for (float& one : lanes) one = 0.5f * one * (1.0f + std::erf(one * 0.70710678f));
        return load(lanes);
    }
    void add_product(int& phase, const Product<T>& of, const float* post_norm) {
        const bool is_apart = post_norm || p.sum;  // more is done to what was found before it is added
        product(phase, of, [&](int row, int from, int count) {
            float* to = (is_apart ? b.wide.data() : b.residual.data()) + size_t(row) * m.hidden + from;
            return [=, this](int r, const float* found) {
                if (is_apart) memcpy(to + size_t(r) * m.hidden, found, size_t(count) * 4);
                else add(to + size_t(r) * m.hidden, found, count, m.residual_scale);
            };
        });
        if (!is_apart) return;
        if (p.sum) {
            if (this_thread == 0) p.sum(b.wide.data(), int64_t(rows.size()) * m.hidden);
            pool.meet(this_thread);
        }
        share(phase, int(rows.size()), [&](int row) {
            const float* from = b.wide.data() + size_t(row) * m.hidden;
            if (!post_norm) return add(residual(row), from, m.hidden, m.residual_scale);
            const float scale = rms(from, m.hidden);
            for (int i = 0; i < m.hidden; i++) residual(row)[i] += from[i] * scale * post_norm[i];
        });
    }
    static void add(float* to, const float* from, int count, float by) {
        int i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, load(to + i) + by * load(from + i));
        for (; i < count; i++) to[i] += by * from[i];
    }
    // Nobody writes to the residual stream before all have met at least twice, so there is no need to meet here.
    void copy_out(float* to) {
        for (size_t row = size_t(this_thread); row < rows.size(); row += size_t(pool.active()))
            memcpy(to + size_t(rows[row].out) * m.hidden, residual(int(row)), size_t(m.hidden) * 4);
    }
    void tap(int layer) {
        const size_t size = size_t(p.batch) * size_t(p.nodes - p.start) * m.hidden;
        for (int i = 0; i < p.num_taps; i++)
            if (p.tap_layers[i] == layer) copy_out(p.taps + size_t(i) * size);
    }
    void work(int thread) {
        int phase = 0;
        this_thread = thread;
        embed(phase);
        for (int index = p.first_layer; index < p.last_layer; index++) {
            phase = 16 * (index - p.first_layer + 1);
            tap(index);
            if (!p.attention_on || p.attention_on[index]) attention(phase, index, thread);
            if (!p.mlp_on || p.mlp_on[index]) mlp(phase, m.layer[index], index + 1 < m.layers ? m.layer[index + 1].qkv : m.head);
        }
        phase = 16 * (p.last_layer - p.first_layer + 1);
        if (p.last_layer == m.layers) tap(m.layers);
        if (p.hidden) copy_out(p.hidden);
        if (p.logits) {
            norm(phase, m.norm, b.last, &speaking);
            const Matrix& then = m.layers ? m.layer[0].qkv : m.head;
            product(phase, {m.head, then, b.last, int(speaking.size())}, [&](int row, int from, int count) {
                return [=, this](int r, const float* found) {
                    const Row& of = rows[speaking[row + r]];
                    float* to = p.logits + size_t(p.last_only ? of.batch : of.out) * m.vocab + from;
                    for (int j = 0; j < count; j++) to[j] = m.logit_scale * found[j];
                    if (m.final_cap > 0)
                        for (int j = 0; j < count; j++) to[j] = m.final_cap * std::tanh(to[j] / m.final_cap);
                };
            });
        }
        release_tiles();
    }

    const Model& m;
    const Pass& p;
    Buffers<T>& b;
    Pool& pool;
    const RowList list;
    const std::vector<Row>& rows = list.rows;
    const std::vector<int>& speaking = list.speaking;
    std::vector<std::atomic<int64_t>> counters;  // by phase and thread: pieces taken from the front, and from the BACK
    TileLook<T> tile_look;
    int score_stride = 0;
    const int page_bits = std::countr_zero(unsigned(p.page_len));
};
