// Attention of one node over its own past: the committed slots of its row, then its ancestors' slots, itself last.
// No mask exists. Keys are taken in order of position, so the additions are those of plain decoding whatever the tree.
#pragma once
#include <algorithm>
#include <cmath>

#include "vector.hpp"

constexpr int MAX_TOGETHER = 4;  // query heads that share one reading of the values

template <class T> struct Past {
    const T* keys;  // [slots][dim] of one row and head
    const T* values;
    int dim;
    int begin, committed;  // slots [begin, committed) are seen
    const int32_t* ancestors;  // slots seen after them, in order
    int num_ancestors;
    int origin;  // position of the first key that is seen
    int size() const { return committed - begin + num_ancestors; }
    int slot(int i) const { return begin + i < committed ? begin + i : ancestors[begin + i - committed]; }
    size_t at(int i) const { return size_t(slot(i)) * dim; }
};

// scores[i] = scale * q . key_i, sixteen keys at a time; past the end the last key again
template <class T> static void score_keys(const Past<T>& past, const float* query, float scale, float* scores) {
    const int size = past.size();
    for (int i = 0; i < size; i += LANES) {
        const T* keys[LANES];
        for (int j = 0; j < LANES; j++) keys[j] = past.keys + past.at(std::min(i + j, size - 1));
        store(scores + i, scale * dots(query, keys, past.dim));
    }
}

// scores -> e^(score - max), zero from `size` on to the next multiple of 16; returns their sum
static float soften(float* scores, int size, float cap) {
    const int padded = (size + LANES - 1) / LANES * LANES;
    for (int i = size; i < padded; i++) scores[i] = -INFINITY;
    V most = splat(-INFINITY);
    for (int i = 0; i < padded; i += LANES) {
        V s = load(scores + i);
        if (cap > 0) s = select(s > splat(-INFINITY), cap * tanh(s / cap), s);
        store(scores + i, s);
        most = max(most, s);
    }
    const V top = splat(largest(most));
    V total = {};
    for (int i = 0; i < padded; i += LANES) {
        V weight = exp(load(scores + i) - top);
        store(scores + i, weight);
        total += weight;
    }
    return sum(total);
}

// out[h] = sum_i weights[h][i] value_i / total[h] for N heads, 16 * C dimensions at a time
template <class T, int N, int C>
static void blend(const Past<T>& past, const float* weights, int stride, const float* totals, int from, float* out) {
    V acc[N][C] = {};
    int i = 0;
    const auto add = [&](int slot) __attribute__((always_inline)) {
        const T* value = past.values + size_t(slot) * past.dim + from;
        V part[C];
        for (int c = 0; c < C; c++) part[c] = load(value + c * LANES);
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) acc[n][c] += weights[size_t(n) * stride + i] * part[c];
        i++;
    };
    for (int slot = past.begin; slot < past.committed; slot++) add(slot);
    for (int a = 0; a < past.num_ancestors; a++) add(past.ancestors[a]);
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) store(out + size_t(n) * past.dim + from + c * LANES, acc[n][c] / totals[n]);
}
template <class T, int N>
static void blend_all(const Past<T>& past, const float* weights, int stride, const float* totals, float* out) {
    constexpr int C = std::max(1, std::min(4, std::max(ACCUMULATORS, MOST_TOGETHER) / N));
    int from = 0;
    for (; from + C * LANES <= past.dim; from += C * LANES) blend<T, N, C>(past, weights, stride, totals, from, out);
    for (; from < past.dim; from += LANES) blend<T, N, 1>(past, weights, stride, totals, from, out);
}

// All query heads of one key head: queries [heads][dim] in, [heads][dim] out. `space` holds heads * stride floats.
template <class T>
static void attend(const Past<T>& past, const float* queries, int heads, float scale, float cap, float* space, int stride, float* out) {
    for (int first = 0; first < heads; first += MAX_TOGETHER) {
        const int count = heads - first < MAX_TOGETHER ? heads - first : MAX_TOGETHER;
        float totals[MAX_TOGETHER];
        for (int n = 0; n < count; n++) {
            score_keys(past, queries + size_t(first + n) * past.dim, scale, space + size_t(n) * stride);
            totals[n] = soften(space + size_t(n) * stride, past.size(), cap);
        }
        float* to = out + size_t(first) * past.dim;
        switch (count) {
            case 4: blend_all<T, 4>(past, space, stride, totals, to); break;
            case 3: blend_all<T, 3>(past, space, stride, totals, to); break;
            case 2: blend_all<T, 2>(past, space, stride, totals, to); break;
            default: blend_all<T, 1>(past, space, stride, totals, to);
        }
    }
}
