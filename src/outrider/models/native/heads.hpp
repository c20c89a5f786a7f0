// Best-first trees of heads without attention, in one call: the twin of drafters/heads/newest.py.
//
// All nodes of a level are asked together. What a node enters with is [state ; moving part]. The state is one of the target's newest. The
// moving part is nothing (Medusa, L-MTP: all nodes of a level enter alike), the embeddings of the tokens from the root on (Hydra), or
// a cell that every token moves on (MLP speculator, ReDrafter).
#pragma once
#include "pass.hpp"
#include "tree.hpp"

enum Moving { NOTHING, TOKENS, CELL };

extern "C" {
// How nodes of one depth are asked. A matrix without inputs is not there.
struct HeadLevel {
    Matrix cell;                  // of the parent's cell, after the token's embedding where heads join them
    const float *norm, *shift;    // of the new cell, or null
    const void* embedding;        // [tokens][embedded] in the heads' type, or null
    Matrix enter, bent;           // x = enter x + silu(bent x); without both it stays
    const Matrix* blocks;         // x += silu(block x)
    Matrix readout;
    int32_t num_blocks, place;    // place: the state's among the newest
};
struct Heads {
    int32_t is_bf16, hidden, embedded, vocab, num_levels, moving;  // the last level serves all depths below it; moving: Moving
    int32_t keeps_state, from_state, joins, is_gelu, halves;       // from_state: the first cell is the state, else zeros; halves: it has length 1 / sqrt 2
    float eps, norm_eps, share;   // of the states' norm, of a cell's; of an embedding that is added to a cell
    const float* state_norm;      // or null
    const HeadLevel* level;
};
struct HeadCall {
    int32_t batch, num_states, num_threads;
    const float* states;          // [batch][num_states][hidden] the newest of the target, the last one last
    const int64_t* roots;         // [batch]
};
}

template <class T> struct HeadBuffers {  // kept between calls
    Buffers<T> products;
    Inputs<T> inputs;
    std::vector<float> states, cells, below, entering, wide, logits;
};

// Nodes of one level after the other
template <class T> class HeadLevels {
  public:
    struct Asked {
        int batch, parent;  // parent: place among the nodes of the level above
        int64_t token;
    };
    HeadLevels(const Heads& heads, const HeadCall& call, HeadBuffers<T>& buffers)
        : h(heads), c(call), b(buffers), none(size_t(call.batch)), model(without_layers()), pass(without_nodes()), run(model, pass, b.products) {
        b.states.assign(c.states, c.states + size_t(c.batch) * c.num_states * h.hidden);
        for (int i = 0; i < c.batch * c.num_states; i++) begin(b.states.data() + size_t(i) * h.hidden);
    }
    // [nodes][vocab] logits after the nodes; of a level where all enter alike, one node of each tree is asked.
    const float* ask(int depth, const std::vector<Asked>& nodes) {
        const HeadLevel& level = h.level[std::min(depth, h.num_levels - 1)];
        const int count = int(nodes.size());
        std::swap(b.cells, b.below);
        const int above = width;
        if (h.moving == TOKENS) width = above + h.embedded;
        if (h.moving == CELL) width = level.cell.out;
        b.cells.resize(size_t(count) * width), b.logits.resize(size_t(count) * h.vocab);
        run.on_all(16 + 4 * level.num_blocks, [&](int) {
            int phase = 0;
            if (h.moving == TOKENS) run.share(phase, count, [&](int i) { append(level, nodes[i], above, cell(i)); });
            if (h.moving == CELL) move(phase, level, nodes, depth);
            enter(phase, level, nodes);
            for (int i = 0; i < level.num_blocks; i++) {
                lay(phase, count, b.wide, level.blocks[i].in);
                product(phase, level.blocks[i], count, [](V was, V found) { return was + silu(found); });
            }
            lay(phase, count, b.wide, level.readout.in);
            run.product(phase, {level.readout, level.readout, b.inputs, count}, [&](int row, int from, int num) {
                float* to = b.logits.data() + size_t(row) * h.vocab + from;
                return [=, this](int r, const float* found) { memcpy(to + size_t(r) * h.vocab, found, size_t(num) * 4); };
            });
        });
        return b.logits.data();
    }

  private:
    Model without_layers() const {
        Model found{};
        found.hidden = h.hidden, found.heads = found.kv_heads = 1, found.head_dim = LANES;
        return found;
    }
    Pass without_nodes() const {
        Pass found{};
        found.batch = c.batch, found.num_threads = c.num_threads, found.sizes = found.lengths = none.data();
        return found;
    }
    static V silu(V x) { return x * inverse(1.0f + exp_of_minus<T>(x)); }
    float* cell(int node) { return b.cells.data() + size_t(node) * width; }
    const float* state(const HeadLevel& level, int batch) const {
        return b.states.data() + (size_t(batch) * c.num_states + level.place) * h.hidden;
    }
    void begin(float* x) const {
        if (h.state_norm) {
            const float scale = Runner<T>::rms(x, h.hidden, h.eps);
            for (int i = 0; i < h.hidden; i++) x[i] = x[i] * scale * h.state_norm[i];
        }
        const float scale = h.halves ? Runner<T>::rms(x, h.hidden, h.norm_eps) * 0.70710678f : 1.0f;
        for (int i = 0; i < h.hidden; i++) x[i] *= scale;
    }
    void embed(const HeadLevel& level, int64_t token, float* to) const {
        const T* from = static_cast<const T*>(level.embedding) + size_t(token) * h.embedded;
        for (int i = 0; i < h.embedded; i++) to[i] = value(from[i]);
    }
    void append(const HeadLevel& level, const Asked& node, int above, float* to) {
        if (above) memcpy(to, b.below.data() + size_t(node.parent) * above, size_t(above) * 4);
        embed(level, node.token, to + above);
    }
    // cells = those of the parents, moved on by the tokens
    void move(int& phase, const HeadLevel& level, const std::vector<Asked>& nodes, int depth) {
        const int count = int(nodes.size()), before = h.joins ? h.embedded : 0, size = level.cell.in - before;
        run.alone([&] { b.entering.resize(size_t(count) * level.cell.in), b.wide.resize(size_t(count) * width); });
        run.share(phase, count, [&](int i) {
            float* to = b.entering.data() + size_t(i) * level.cell.in;
            const float* from = depth ? b.below.data() + size_t(nodes[i].parent) * size : h.from_state ? state(level, nodes[i].batch) : nullptr;
            if (before) embed(level, nodes[i].token, to);
            if (from) memcpy(to + before, from, size_t(size) * 4);
            else memset(to + before, 0, size_t(size) * 4);
        });
        lay(phase, count, b.entering, level.cell.in);
        product(phase, level.cell, count, [](V, V found) { return found; });
        run.share(phase, count, [&](int i) {
            std::vector<float> embedded(h.joins ? 0 : h.embedded);
            float* x = b.wide.data() + size_t(i) * width;
            if (!h.joins) embed(level, nodes[i].token, embedded.data());
            for (size_t j = 0; j < embedded.size(); j++) x[j] += h.share * embedded[j];
            const float scale = level.norm ? Runner<T>::rms(x, width, h.norm_eps) : 1.0f;
            for (int j = 0; j < width; j++) x[j] = level.norm ? x[j] * scale * level.norm[j] + level.shift[j] : x[j];
            for (int j = 0; j < width; j++) cell(i)[j] = h.is_gelu ? gelu(x[j]) : x[j] / (1.0f + std::exp(-x[j]));
        });
    }
    static float gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }
    // wide = what the blocks of a level begin with
    void enter(int& phase, const HeadLevel& level, const std::vector<Asked>& nodes) {
        const int count = int(nodes.size()), kept = h.keeps_state ? h.hidden : 0, size = kept + width;
        const bool stays = !level.enter.in && !level.bent.in;
        const int next = stays ? size : level.enter.in ? level.enter.out : level.bent.out;
        run.alone([&] { b.entering.resize(size_t(count) * size), b.wide.assign(size_t(count) * next, 0.0f); });
        run.share(phase, count, [&](int i) {
            float* to = (stays ? b.wide : b.entering).data() + size_t(i) * size;
            memcpy(to, state(level, nodes[i].batch), size_t(kept) * 4);
            memcpy(to + kept, cell(i), size_t(width) * 4);
        });
        if (stays) return;
        lay(phase, count, b.entering, size);
        if (level.enter.in) product(phase, level.enter, count, [](V, V found) { return found; });
        if (level.bent.in) product(phase, level.bent, count, [](V was, V found) { return was + silu(found); });
    }
    // inputs = rows of `from`
    void lay(int& phase, int count, const std::vector<float>& from, int size) {
        run.alone([&] { b.inputs.reshape(count, size); });
        run.share(phase, count, [&](int i) {
            b.inputs.put_some(i, 0, from.data() + size_t(i) * size, size);
            b.inputs.clear(i, size);
        });
    }
    // wide = made of what it was and of inputs times w
    template <class F> void product(int& phase, const Matrix& w, int count, F made) {
        run.product(phase, {w, w, b.inputs, count}, [&](int row, int from, int num) {
            float* to = b.wide.data() + size_t(row) * w.out + from;
            return [=, &w](int r, const float* found) {
                float *at = to + size_t(r) * w.out, last[2][LANES] = {};
                int i = 0;
                for (; i + LANES <= num; i += LANES) store(at + i, made(load(at + i), load(found + i)));
                if (i == num) return;
                memcpy(last[0], at + i, size_t(num - i) * 4), memcpy(last[1], found + i, size_t(num - i) * 4);
                store(last[0], made(load(last[0]), load(last[1])));
                memcpy(at + i, last[0], size_t(num - i) * 4);
            };
        });
    }
    const Heads& h;
    const HeadCall& c;
    HeadBuffers<T>& b;
    const std::vector<int32_t> none;
    const Model model;
    const Pass pass;
    Runner<T> run;
    int width = 0;  // of the moving part
};

template <class T> static void grow_from_heads(const Heads& heads, const HeadCall& call, const Tree& tree) {
    static auto* buffers = new HeadBuffers<T>;
    HeadLevels<T> levels(heads, call, *buffers);
    const bool is_shared = heads.moving == NOTHING;
    std::vector<typename HeadLevels<T>::Asked> asked, next;
    std::vector<RowGrowth> rows;
    for (int row = 0; row < call.batch; row++) rows.emplace_back(tree, row);
    for (int row = 0; row < call.batch; row++)
        if (rows[row].goes_on(0)) asked.push_back({row, 0, call.roots[row]});
    for (int depth = 0; !asked.empty(); depth++) {
        const float* logits = levels.ask(depth, asked);
        int numbered = 0;
        next.clear();
        for (int first = 0, count; first < int(asked.size()); first += count) {
            const int row = asked[first].batch;
            RowGrowth& growth = rows[row];
            const size_t begin = growth.pool.size();
            count = is_shared ? 1 : int(growth.frontier.size());
            growth.add(logits + size_t(first) * heads.vocab, heads.vocab, is_shared ? 0 : size_t(heads.vocab), depth);
            if (!growth.goes_on(depth + 1)) continue;
            growth.choose(begin, numbered);
            for (int place : growth.frontier) {
                const Candidate& one = growth.pool[place];
                next.push_back({row, one.parent ? growth.pool[one.parent].number - 1 : first, one.token});
                if (is_shared) break;
            }
        }
        std::swap(asked, next);
    }
    for (auto& row : rows) row.write();
}
