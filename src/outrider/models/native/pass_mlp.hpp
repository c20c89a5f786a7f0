// The feed-forward half of a layer: gate, activation, experts, and the sum into the residual stream.
#pragma once
#include "pass_norms.hpp"

constexpr int CLAMPED = 3;  // activation g sigmoid(SLOPE g) (u + 1), g at most LIMIT and u within it
constexpr float SLOPE = 1.702f, LIMIT = 7.0f;

template <class T> class PassMlp : public PassNorms<T> {
  public:
    using PassNorms<T>::PassNorms;
    using PassNorms<T>::add;
    using PassNorms<T>::b;
    using PassNorms<T>::m;
    using PassNorms<T>::norm;
    using PassNorms<T>::p;
    using PassNorms<T>::pool;
    using PassNorms<T>::product;
    using PassNorms<T>::residual;
    using PassNorms<T>::rms;
    using PassNorms<T>::rows;
    using PassNorms<T>::share;

    void mlp(int& phase, const LayerWeights& w, const Matrix& then) {
        Inputs<T>& x = m.parallel ? b.beside : b.narrow;
        if (!m.parallel) norm(phase, {w.mlp_norm, w.mlp_norm_bias}, x);
        if (w.experts) {
            b.experts.feed(*this, phase, *w.experts, x);
            return add_wide(phase, w.mlp_post_norm);
        }
        gate(phase, {w.gate_up, w.down, x, int(rows.size())});
        add_product(phase, {w.down, then, b.gated, int(rows.size())}, w.mlp_post_norm);
    }
    // gated = what goes into the second product of an MLP
    void gate(int& phase, const Product<T>& of) {
        product(phase, of, [&](int row, int from, int count) {
            auto* to = b.gated.at(row, m.gated ? from / 2 : from);
            const bool is_last = from + count == of.w.out;
            return [=, this, &w = of.w](int r, const float* found) {
                if (m.gated)
                    for (int j = 0; j < count; j += 2 * BLOCK)
                        Inputs<T>::write(to + size_t(r) * b.gated.step() + j / 2, gated(load(found + j), load(found + j + BLOCK)));
                else
                    for (int j = 0; j < count; j += BLOCK) b.gated.put(row + r, from + j, activated(load(found + j)));
                if (is_last) b.gated.clear(row + r, m.gated ? w.out / 2 : w.out);
            };
        });
    }
    // The same for one row of an expert
    void put_gated(Inputs<T>& to, int row, const Matrix& w, int from, int count, const float* found) const {
        for (int j = 0; j < count; j += 2 * BLOCK) to.put(row, (from + j) / 2, gated(load(found + j), load(found + j + BLOCK)));
        if (from + count == w.out) to.clear(row, w.out / 2);
    }
    // wide = what an MLP makes of x
    void whole_mlp(int& phase, const Matrix& gate_up, const Matrix& down, Inputs<T>& x) {
        gate(phase, {gate_up, down, x, int(rows.size())});
        product(phase, {down, down, b.gated, int(rows.size())}, [&](int row, int from, int count) {
            float* to = b.wide.data() + size_t(row) * m.hidden + from;
            return [=, this](int r, const float* found) { memcpy(to + size_t(r) * m.hidden, found, size_t(count) * 4); };
        });
    }
    V gated(V gate, V up) const {
        if (m.activation != CLAMPED) return activated(gate) * up;
        const V low = select(gate > splat(LIMIT), splat(LIMIT), gate), within = max(select(up > splat(LIMIT), splat(LIMIT), up), splat(-LIMIT));
        return low * inverse(1.0f + exp_of_minus<T>(SLOPE * low)) * (within + 1.0f);
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
        if (is_apart) add_wide(phase, post_norm);
    }
    // residual += wide, summed over ranks and normalised first where that is to be done
    void add_wide(int& phase, const float* post_norm) {
        if (p.sum) {
            if (this_thread == 0) p.sum(b.wide.data(), int64_t(rows.size()) * m.hidden);
            pool.meet(this_thread);
        }
        share(phase, int(rows.size()), [&](int row) {
            const float* from = b.wide.data() + size_t(row) * m.hidden;
            if (!post_norm) return add(residual(row), from, m.hidden, m.residual_scale);
            const float scale = rms(from, m.hidden, m.norm_eps);
            for (int i = 0; i < m.hidden; i++) residual(row)[i] += from[i] * scale * post_norm[i];
        });
    }
};
