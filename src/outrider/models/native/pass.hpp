// One pass of a decoder over the nodes of B trees, from tokens to logits: the twin of decoder.py.
//
// A pass is a fixed sequence of phases that a few threads go through together; the residual stream is float32, matrices
// and cache are bfloat16 or float32. Only real nodes are computed (no padding). Nothing is allocated per layer.
//
// The phases are made of pass_threads.hpp (who does what), pass_products.hpp, pass_norms.hpp, pass_mlp.hpp and pass_attention.hpp.
#pragma once
#include "pass_attention.hpp"

template <class T> class Runner : public PassAttention<T> {
  public:
    using PassAttention<T>::PassAttention;
    using PassAttention<T>::attention;
    using PassAttention<T>::b;
    using PassAttention<T>::grow;
    using PassAttention<T>::has_tile_attention;
    using PassAttention<T>::latent;
    using PassAttention<T>::list;
    using PassAttention<T>::m;
    using PassAttention<T>::mlp;
    using PassAttention<T>::norm;
    using PassAttention<T>::on_all;
    using PassAttention<T>::p;
    using PassAttention<T>::pool;
    using PassAttention<T>::product;
    using PassAttention<T>::put_beside;
    using PassAttention<T>::residual;
    using PassAttention<T>::rows;
    using PassAttention<T>::score_stride;
    using PassAttention<T>::share;
    using PassAttention<T>::speaking;
    using PassAttention<T>::token_of;

    void run() {
        if (rows.empty()) return;
        b.residual.grow(rows.size() * m.hidden);
        b.wide.grow(rows.size() * std::max(latent() ? 0 : (m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden));
        b.narrow.reshape(int(rows.size()), std::max(m.continues_states() ? 2 * m.hidden : m.hidden, m.heads * (latent() ? latent()->value_dim : m.head_dim)));
        b.gated.reshape(int(rows.size()), m.mlp);
        if (m.parallel) b.beside.reshape(int(rows.size()), m.hidden);
        if (m.query_span == ALL_HEADS) grow(b.scales, 2 * rows.size());
        b.experts.reshape(m, int(rows.size()));
        b.latents.reshape(m, int(rows.size()));
        b.last.reshape(int(speaking.size()), m.hidden);
        const int widest = std::max({m.hidden, m.heads * m.head_dim, m.mlp});
        if (m.has_stored & 1) b.rounded.reshape(int(rows.size()), widest);
        if (m.has_stored & 2) b.halves.reshape(int(rows.size()), widest);
        b.spaces.resize(pool.size());
        b.queries.grow(has_tile_attention() ? rows.size() * m.heads * m.head_dim : 0);
        if (has_tile_attention()) tile_look.prepare(*this);
        score_stride = std::min(up(list.longest + p.nodes, LANES) + LANES, SCORE_STRIDE);
        on_all(PHASES * (p.last_layer - p.first_layer + 2), [this](int thread) { work(thread); });
    }

  private:
    using PassAttention<T>::tile_look;

    void embed(int& phase) {
        share(phase, int(rows.size()), [&](int r) {
            float* to = residual(r);
            const Row& row = rows[r];
            if (p.first_layer > 0 || !m.embedding || m.continues_states()) {
                memcpy(to, p.hidden + size_t(row.out) * m.hidden, size_t(m.hidden) * 4);
                return;
            }
            put_embedding<T>(m, token_of(r), to);
        });
        if (!m.entry.in) return;
        put_beside(phase, nullptr, nullptr);
        product(phase, {m.entry, m.layer[0].qkv, b.narrow, int(rows.size())}, [&](int row, int from, int count) {
            float* to = residual(row) + from;
            return [=, this](int r, const float* found) { memcpy(to + size_t(r) * m.hidden, found, size_t(count) * 4); };
        });
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
    // Where the logits of a row go
    size_t place_of(const Row& row) const {
        if (p.last_only) return size_t(row.batch);
        return p.num_spoken ? size_t(row.batch) * p.spoken_nodes + (row.node - p.start) : size_t(row.out);
    }
    void work(int thread) {
        int phase = 0;
        embed(phase);
        for (int index = p.first_layer; index < p.last_layer; index++) {
            const LayerWeights& w = m.layer[index];
            const bool attends = !p.attention_on || p.attention_on[index], feeds = !p.mlp_on || p.mlp_on[index];
            phase = PHASES * (index - p.first_layer + 1);
            tap(index);
            if (m.parallel && feeds)
                norm(phase, w.mlp_norm ? NormWeights{w.mlp_norm, w.mlp_norm_bias} : NormWeights{w.attention_norm, w.attention_norm_bias}, b.beside);
            if (attends) attention(phase, index, thread);
            if (feeds) mlp(phase, w, index + 1 < m.layers ? m.layer[index + 1].qkv : m.head);
        }
        phase = PHASES * (p.last_layer - p.first_layer + 1);
        if (p.last_layer == m.layers) tap(m.layers);
        if (p.hidden) copy_out(p.hidden);
        if (p.logits) {
            norm(phase, {m.norm, m.norm_bias}, b.last, &speaking);
            const Matrix& then = m.layers ? m.layer[0].qkv : m.head;
            product(phase, {m.head, then, b.last, int(speaking.size())}, [&](int row, int from, int count) {
                return [=, this](int r, const float* found) {
                    const Row& of = rows[speaking[row + r]];
                    float* to = p.logits + place_of(of) * m.vocab + from;
                    for (int j = 0; j < count; j++) to[j] = m.logit_scale * found[j];
                    if (m.final_cap > 0)
                        for (int j = 0; j < count; j++) to[j] = m.final_cap * std::tanh(to[j] / m.final_cap);
                };
            });
        }
    }
};
