// The attention half of a layer: queries, keys and values are normed, rotated and put in their places, then each query looks.
#pragma once
#include <bit>

#include "attention.hpp"
#include "isa/tile_look.hpp"
#include "pass_mlp.hpp"

constexpr int CHUNK = 16;  // rows that are rotated at once

template <class T> class PassAttention : public PassMlp<T> {
  public:
    using PassMlp<T>::PassMlp;
    using PassMlp<T>::add_product;
    using PassMlp<T>::b;
    using PassMlp<T>::grow;
    using PassMlp<T>::list;
    using PassMlp<T>::m;
    using PassMlp<T>::moments;
    using PassMlp<T>::norm;
    using PassMlp<T>::p;
    using PassMlp<T>::pool;
    using PassMlp<T>::product;
    using PassMlp<T>::put;
    using PassMlp<T>::put_normed;
    using PassMlp<T>::residual;
    using PassMlp<T>::rotate;
    using PassMlp<T>::rows;
    using PassMlp<T>::share;
    using PassMlp<T>::squares_of;
    using PassMlp<T>::turn;

    const Latent* latent() const { return m.layers ? m.layer[0].latent : nullptr; }
    int per_head() const { return (m.heads / m.kv_heads + 2) * m.head_dim; }
    // The queries of a key head, its key and its value at one row. Outputs of qkv come in this order too (packed_model.py), so that a
    // thread finds in its own cache what it needs for the attention of a head.
    float* heads_of(int head, int row) { return b.wide.data() + (size_t(head) * rows.size() + row) * per_head(); }
    T* queries_of(int head, int row) { return b.queries.data() + (size_t(head) * rows.size() + row) * (m.heads / m.kv_heads) * m.head_dim; }
    // Outputs of a head come with those that they are rotated with, sixteen and sixteen, where that can be.
    int column_of(int output) const {
        const int within = output % per_head(), dim = m.head_dim, block = within % dim / BLOCK;
        return dim % (2 * BLOCK) ? within : within / dim * dim + block / 2 * BLOCK + block % 2 * (dim / 2);
    }
    int64_t token_of(int r) const { return p.tokens[size_t(rows[r].batch) * p.nodes + rows[r].node]; }
    // narrow = the embedding of each token and the stream, side by side, each after its norm
    void put_beside(int& phase, const float* first, const float* second) {
        share(phase, int(rows.size()), [&](int row) {
            std::vector<float> embedded(m.hidden);
            put_embedding<T>(m, token_of(row), embedded.data());
            if (first) put_normed(embedded.data(), {first, nullptr}, b.narrow, row);
            else b.narrow.put_some(row, 0, embedded.data(), m.hidden);
            if (second) put_normed(residual(row), {second, nullptr}, b.narrow, row, m.hidden);
            else b.narrow.put_some(row, m.hidden, residual(row), m.hidden);
            b.narrow.clear(row, 2 * m.hidden);
        });
    }
    // The norms of the queries of a key head and of its key, at one row
    void norm_heads(const LayerWeights& w, int head, int r) {
        const int dim = m.head_dim, group = m.heads / m.kv_heads;
        for (int i = 0; i <= group; i++) {
            float* x = heads_of(head, r) + i * dim;
            const int number = m.query_span == ONE_HEAD ? 0 : i < group ? head * group + i : head;
            const float* weight = (i < group ? w.q_norm : w.k_norm) + size_t(number) * dim;
            const Moments found = m.query_span == ALL_HEADS ? Moments{0.0f, b.scales[2 * r + (i == group)]} : moments(x, dim);
            for (int j = 0; j < dim; j++) x[j] = (x[j] - found.mean) * found.scale * weight[j];
        }
    }
    // Of norms for which all heads of a row are one vector
    void scale_heads(int& phase) {
        share(phase, int(rows.size()), [&](int r) {
            const int dim = m.head_dim, group = m.heads / m.kv_heads;
            float queries = 0, keys = 0;
            for (int head = 0; head < m.kv_heads; head++) {
                for (int i = 0; i < group; i++) queries += squares_of(heads_of(head, r) + i * dim, dim);
                keys += squares_of(heads_of(head, r) + group * dim, dim);
            }
            b.scales[2 * r] = 1.0f / std::sqrt(queries / (m.heads * dim) + m.norm_eps);
            b.scales[2 * r + 1] = 1.0f / std::sqrt(keys / (m.kv_heads * dim) + m.norm_eps);
        });
    }
    Slots<T> slots(int layer, int which, int batch, int head) const {
        const size_t per_head = size_t(p.page_len) * m.head_dim, index = (size_t(layer) * (latent() ? 1 : 2) + which) * p.num_pages * m.kv_heads + head;
        T* first = static_cast<T*>(p.cache) + index * per_head;
        return {first, p.pages + size_t(batch) * p.columns, m.kv_heads * per_head, page_bits, m.head_dim};
    }
    void attention(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
        if (w.beside_norm) put_beside(phase, w.beside_norm, w.attention_norm);
        else norm(phase, {w.attention_norm, w.attention_norm_bias}, b.narrow);
        if (w.latent) b.latents.look(*this, phase, index, thread);
        else look_at_keys(phase, index, thread);
        add_product(phase, {w.out, w.experts ? w.experts->router : w.gate_up, b.narrow, int(rows.size())}, w.attention_post_norm);
    }
    // narrow = what each query of it saw
    void look_at_keys(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
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
        if (w.q_norm && m.query_span == ALL_HEADS) scale_heads(phase);
        if (!is_direct) {
            share(phase, m.kv_heads * num_chunks, [&](int piece) {
                const int head = piece / num_chunks, first = piece % num_chunks * CHUNK;
                for (int r = first; r < std::min(first + CHUNK, int(rows.size())); r++) place(w, index, head, r);
            });
        }
        look(phase, index, thread);
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
        const size_t angle = size_t(row.position) * dim;
        if (w.q_norm) norm_heads(w, head, r);
        for (int i = 0; i <= group && w.rope >= 0; i++) rotate(x + i * dim, dim, p.cosines[w.rope] + angle, p.sines[w.rope] + angle);
        if (has_tile_attention()) put(queries_of(head, r), x, group * dim);
        for (int which = 0; which < 2; which++)
            put(slots(index, which, row.batch, head).at(row.slot), x + (group + which) * dim, dim);
    }
    bool has_tile_attention() const { return TileLook<T>::fits(m, p) && !latent() && !(m.layers && m.layer[0].sinks); }
    // narrow = what each query saw
    void look(int& phase, int index, int thread) {
        const LayerWeights& w = m.layer[index];
        const int dim = m.head_dim, group = m.heads / m.kv_heads;
        if (has_tile_attention()) return tile_look.look(*this, phase, index);
        const int most = list.most_of_band * group;
        std::vector<const float*> queries;
        auto& space = b.spaces[thread];
        grow(space, size_t(most) * (score_stride + dim));
        float* seen = space.data() + size_t(most) * score_stride;
        share(phase, int(list.bands.size()) * m.kv_heads, [&](int piece) {
            const auto [first, last] = list.bands[piece / m.kv_heads];
            const int head = piece % m.kv_heads;
            Past<T> pasts[MOST_LOOKING];
            queries.resize(size_t(last - first) * group);
            for (int r = first; r < last; r++) {
                pasts[r - first] = past_of(w, index, rows[r], head);
                for (int i = 0; i < group; i++) queries[(r - first) * group + i] = heads_of(head, r) + i * dim;
            }
            for (int h = 0; h < group; h += MOST_LOOKING) {  // a band has several rows only where these are all heads
                const int heads = std::min(MOST_LOOKING, group - h);
                const float* sinks = w.sinks ? w.sinks + head * group + h : nullptr;
                attend<T>({pasts, queries.data() + h, last - first, heads, sinks}, m.query_scale, m.attention_cap, space.data(), score_stride, seen + size_t(h) * dim);
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
                row.ancestors.data() + hidden, int(row.ancestors.size()) - hidden, origin, m.head_dim};
    }

    int score_stride = 0;

  protected:
    TileLook<T> tile_look;

  private:
    const int page_bits = std::countr_zero(unsigned(p.page_len));
};
