// Latent attention in its absorbed form: the twin of latent.py.
//
// The cache holds one short vector per token, the normalised latent and the rotated key that all heads share. A head's part of the
// up-projection of keys multiplies its query, and its part of that of values multiplies what it has seen. In between all heads look at the
// latents, as at one key head whose first `rank` dimensions are its values.
#pragma once
#include <deque>
#include <vector>

#include "attention.hpp"
#include "model.hpp"
#include "products.hpp"

constexpr int HEADS_TOGETHER = 16;  // that one piece of work looks with

// Kept between passes
template <class T> class LatentLayers {
  public:
    void reshape(const Model& m, int num_rows) {
        if (!m.layers || !m.layer[0].latent) return;
        const Latent& of = *m.layer[0].latent;
        found.grow(size_t(num_rows) * std::max(m.layer[0].qkv.out, m.heads * (of.nope_dim + of.rope_dim)));
        queries.grow(size_t(num_rows) * m.heads * m.head_dim);
        if (of.query_up.in) query_latents.reshape(num_rows, of.query_up.in);
        while (int(free.size()) < m.heads) free.emplace_back(), seen.emplace_back();
        auto* to = free_memory.grow(Inputs<T>::room(num_rows, of.nope_dim) * m.heads);
        auto* seen_to = seen_memory.grow(Inputs<T>::room(num_rows, of.rank) * m.heads);
        for (int head = 0; head < m.heads; head++)
            to = free[head].lay(num_rows, of.nope_dim, to), seen_to = seen[head].lay(num_rows, of.rank, seen_to);
    }
    // narrow = what the heads of each row make of the latents they saw
    template <class R> void look(R& run, int& phase, int index, int thread) {
        const LayerWeights& w = run.m.layer[index];
        const Latent& of = *w.latent;
        const int num_rows = int(run.rows.size());
        into_found(run, phase, {w.qkv, of.query_up.in ? of.query_up : of.key_up[0], run.b.narrow, num_rows});
        run.share(phase, num_rows, [&](int row) {
            place(run, index, row);
            if (!of.query_up.in) part_queries(run, w, row, w.qkv.out);
        });
        if (of.query_up.in) {
            into_found(run, phase, {of.query_up, of.key_up[0], query_latents, num_rows});
            run.share(phase, num_rows, [&](int row) { part_queries(run, w, row, of.query_up.out); });
        }
        run.products(phase, parts_of(run, of.key_up, free), [&](int head, int row, int from, int count, const float* at) {
            memcpy(query(run, row, head) + from, at, size_t(count) * 4);
        });
        see(run, phase, index, thread);
        run.products(phase, parts_of(run, of.value_up, seen), [&](int head, int row, int from, int count, const float* at) {
            run.b.narrow.put_some(row, head * of.value_dim + from, at, count);
        });
    }

  private:
    template <class R> float* query(R& run, int row, int head) {
        return queries.data() + (size_t(row) * run.m.heads + head) * run.m.head_dim;
    }
    template <class R> std::vector<OneOf<T>> parts_of(R& run, const Matrix* ups, std::deque<Inputs<T>>& rows) {
        std::vector<OneOf<T>> parts;
        for (int head = 0; head < run.m.heads; head++) parts.push_back({&ups[head], &rows[head], int(run.rows.size())});
        return parts;
    }
    template <class R> void into_found(R& run, int& phase, const Product<T>& of) {
        run.product(phase, of, [&](int row, int from, int count) {
            float* to = found.data() + size_t(row) * of.w.out + from;
            return [=, out = size_t(of.w.out)](int r, const float* at) { memcpy(to + r * out, at, size_t(count) * 4); };
        });
    }
    template <class R> static void rotate(R& run, const LayerWeights& w, int row, float* x) {
        const int dim = w.latent->rope_dim;
        const size_t angle = size_t(run.rows[row].position) * dim;
        if (w.rope >= 0) run.rotate(x, dim, run.p.cosines[w.rope] + angle, run.p.sines[w.rope] + angle);
    }
    // Writes the latent and the key of a row where attention finds them, and normalises what its queries are made of.
    template <class R> void place(R& run, int index, int r) {
        const LayerWeights& w = run.m.layer[index];
        const Latent& of = *w.latent;
        const Row& row = run.rows[r];
        float *x = found.data() + size_t(r) * w.qkv.out, *latent = x + w.qkv.out - run.m.head_dim;
        rotate(run, w, r, latent + of.rank);
        const float scale = run.rms(latent, of.rank, of.norm_eps);
        for (int i = 0; i < of.rank; i++) latent[i] = latent[i] * scale * of.norm[i];
        run.put(run.slots(index, 0, row.batch, 0).at(row.slot), latent, run.m.head_dim);
        if (!of.query_up.in) return;
        const float query_scale = run.rms(x, of.query_up.in, of.norm_eps);
        for (int i = 0; i < of.query_up.in; i++) x[i] = x[i] * query_scale * of.query_norm[i];
        query_latents.put_some(r, 0, x, of.query_up.in);
        query_latents.clear(r, of.query_up.in);
    }
    // The part of each query that meets latents goes to its head's product; the rotated part is ready.
    template <class R> void part_queries(R& run, const LayerWeights& w, int row, int stride) {
        const Latent& of = *w.latent;
        for (int head = 0; head < run.m.heads; head++) {
            float* x = found.data() + size_t(row) * stride + size_t(head) * (of.nope_dim + of.rope_dim);
            rotate(run, w, row, x + of.nope_dim);
            memcpy(query(run, row, head) + of.rank, x + of.nope_dim, size_t(of.rope_dim) * 4);
            free[head].put_some(row, 0, x, of.nope_dim);
            free[head].clear(row, of.nope_dim);
        }
        run.b.narrow.clear(row, run.m.heads * of.value_dim);
    }
    // One piece is a tile of rows and some of the heads.
    template <class R> void see(R& run, int& phase, int index, int thread) {
        const Model& m = run.m;
        const Latent& of = *m.layer[index].latent;
        const int chunks = up(m.heads, HEADS_TOGETHER) / HEADS_TOGETHER, wide = up(of.rank, LANES), most = run.list.most_rows * HEADS_TOGETHER;
        auto& space = run.b.spaces[thread];
        run.grow(space, size_t(most) * (run.score_stride + wide));
        float* out = space.data() + size_t(most) * run.score_stride;
        std::vector<const float*> looking;
        run.share(phase, int(run.list.tiles.size()) * chunks, [&](int piece) {
            const auto [begin, end] = run.list.tiles[piece / chunks];
            const int head = piece % chunks * HEADS_TOGETHER, heads = std::min(HEADS_TOGETHER, m.heads - head);
            Past<T> pasts[16];
            looking.clear();
            for (int r = begin; r < end; r++) {
                pasts[r - begin] = run.past_of(m.layer[index], index, run.rows[r], 0);
                pasts[r - begin].values = pasts[r - begin].keys, pasts[r - begin].seen = wide;
                for (int i = 0; i < heads; i++) looking.push_back(query(run, r, head + i));
            }
            attend<T>({pasts, looking.data(), end - begin, heads}, m.query_scale, m.attention_cap, space.data(), run.score_stride, out);
            for (int n = 0; n < (end - begin) * heads; n++) {
                seen[head + n % heads].put_some(begin + n / heads, 0, out + size_t(n) * wide, of.rank);
                seen[head + n % heads].clear(begin + n / heads, of.rank);
            }
        });
    }
    Memory<float> found, queries;  // what a product found; [rows][heads][rank and rotated]
    Inputs<T> query_latents;
    std::deque<Inputs<T>> free, seen;  // by head: queries that are not rotated, and what they saw
    Memory<typename Inputs<T>::Stored> free_memory, seen_memory;
};
