// What a pass does to one row at a time: norms, rotations and sums.
#pragma once
#include "pass_products.hpp"

template <class T> class PassNorms : public PassProducts<T> {
  public:
    using PassProducts<T>::PassProducts;
    using PassProducts<T>::m;
    using PassProducts<T>::residual;
    using PassProducts<T>::rows;
    using PassProducts<T>::share;

    static float squares_of(const float* x, int size) {
        V squares[4] = {};
        float rest = 0;
        int i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES)
            for (int j = 0; j < 4; j++) squares[j] += load(x + i + j * LANES) * load(x + i + j * LANES);
        for (; i + LANES <= size; i += LANES) squares[0] += load(x + i) * load(x + i);
        for (; i < size; i++) rest += x[i] * x[i];
        return sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
    }
    static float rms(const float* x, int size, float eps) { return 1.0f / std::sqrt(squares_of(x, size) / size + eps); }
    // What a norm takes off first, and multiplies with
    Moments moments(const float* x, int size) const {
        if (!m.layer_norms) return {0.0f, rms(x, size, m.norm_eps)};
        V totals = {}, squares = {};
        float rest = 0, rest_squares = 0;
        int i = 0;
        for (; i + LANES <= size; i += LANES) totals += load(x + i);
        for (; i < size; i++) rest += x[i];
        const float mean = (sum(totals) + rest) / size;
        for (i = 0; i + LANES <= size; i += LANES) squares += (load(x + i) - mean) * (load(x + i) - mean);
        for (; i < size; i++) rest_squares += (x[i] - mean) * (x[i] - mean);
        return {mean, 1.0f / std::sqrt((sum(squares) + rest_squares) / size + m.norm_eps)};
    }
    static void put(float* to, const float* from, int size) { memcpy(to, from, size_t(size) * 4); }
    static void put(bf16* to, const float* from, int size) {
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(to + i, load(from + i));
        for (; i < size; i++) to[i] = to_bf16(from[i]);
    }
    void norm(int& phase, NormWeights of, Inputs<T>& to, const std::vector<int>* chosen = nullptr) {
        share(phase, int(chosen ? chosen->size() : rows.size()), [&](int row) {
            const float* x = residual(chosen ? (*chosen)[row] : row);
            if (of.weight) put_normed(x, of, to, row);
            else to.put_some(row, 0, x, m.hidden);
            to.clear(row, m.hidden);
        });
    }
    void put_normed(const float* x, NormWeights of, Inputs<T>& to, int row, int begin = 0) const {
        const Moments found = moments(x, m.hidden);
        const auto line = to.line(row);
        int i = 0;
        for (; i + LANES <= m.hidden; i += LANES) {
            const V normed = (load(x + i) - found.mean) * found.scale * load(of.weight + i);
            line.put(begin + i, of.bias ? normed + load(of.bias + i) : normed);
        }
        for (; i < m.hidden; i++) {
            const float normed = (x[i] - found.mean) * found.scale * of.weight[i];
            Inputs<T>::write(line.at(begin + i), of.bias ? normed + of.bias[i] : normed);
        }
    }
    static void turn(V& low, V& high, const float* cos, const float* sin, int half) {
        const V was = low;
        low = was * load(cos) + high * load(sin);
        high = high * load(cos + half) + was * load(sin + half);
    }
    static void rotate(float* x, int dim, const float* cos, const float* sin) {
        const int half = dim / 2;
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
    static void add(float* to, const float* from, int count, float by) {
        int i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, load(to + i) + by * load(from + i));
        for (; i < count; i++) to[i] += by * from[i];
    }
};
