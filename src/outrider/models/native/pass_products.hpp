// Products of rows with a matrix in a pass. The weights of a piece are read from memory once, for all rows.
#pragma once
#include <optional>

#include "pass_threads.hpp"

template <class T> class PassProducts : public PassThreads<T> {
  public:
    using PassThreads<T>::PassThreads;
    using PassThreads<T>::alone;
    using PassThreads<T>::b;
    using PassThreads<T>::pool;
    using PassThreads<T>::share;

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
    template <class F> void product(int& phase, const Product<T>& asked, F take) {
        const Product<T> of{asked.w, asked.then, asked.w.order ? in_order(phase, asked) : asked.x, asked.rows};
        if (of.w.is_stored == IN_PLACE) return product_of<InPlace<T>>(phase, of, take);
        if constexpr (sizeof(T) == 2) {
            if (of.w.scales) return product_of<int8_t>(phase, of, take);
        } else {
            if (of.w.is_stored == IN_HALF) return product_of<half>(phase, of, take);
            if (of.w.is_stored == IN_BRAIN) return product_of<bf16>(phase, of, take);
            if (of.w.is_stored == IN_HALF_SUMS) return round(phase, of, b.halves), product_of<HalfSums>(phase, of, take);
            if (of.w.is_stored == WITH_FLOATS) return product_of<Unpacked>(phase, of, take);
            if (of.w.is_stored) return round(phase, of, b.rounded), product_of<AnyStored>(phase, of, take);
        }
        product_of<T>(phase, of, take);
    }
    // The rows with their inputs in the order of the matrix's columns
    Inputs<T>& in_order(int& phase, const Product<T>& of) {
        alone([&] { b.ordered.reshape(of.rows, of.w.in); });
        share(phase, of.rows, [&](int row) {
            for (int i = 0; i < of.w.in; i++) *b.ordered.at(row, i) = *of.x.at(row, of.w.order[i]);
        });
        return b.ordered;
    }
    template <class R> void round(int& phase, const Product<T>& of, R& to) {
        share(phase, of.rows, [&](int row) { to.round(row, of.x.at(row, 0), of.w.in); });
    }
    template <class W> auto group_of(const Product<T>& of, int row) {
        if constexpr (is_stored<W>) return b.rounded.group(row);
        else if constexpr (std::is_same_v<W, HalfSums>) return b.halves.group(row);
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
    // Several products, each of a matrix with rows of its own: put(part, row, from, count, found) takes what one row found. Pieces of all
    // of them are handed out together, so that matrices with few rows keep all threads busy.
    template <class F> void products(int& phase, const std::vector<OneOf<T>>& parts, const F& put) {
        const Matrix& w = *parts[0].w;  // all are of one kind
        if constexpr (sizeof(T) == 2) {
            if (w.scales) return products_of<int8_t>(phase, parts, put);
        } else {
            if (w.is_stored == IN_HALF) return products_of<half>(phase, parts, put);
            if (w.is_stored == IN_BRAIN) return products_of<bf16>(phase, parts, put);
            if (w.is_stored == IN_HALF_SUMS) return round_parts(phase, parts, b.half_parts, HALF_ROWS), products_of<HalfSums>(phase, parts, put);
            if (w.is_stored == WITH_FLOATS) return products_of<Unpacked>(phase, parts, put);
            if (w.is_stored) return round_parts(phase, parts, b.rounded_parts, PANEL_ROWS), products_of<AnyStored>(phase, parts, put);
        }
        products_of<T>(phase, parts, put);
    }
    // The rows of every part begin a panel of rounded rows.
    template <class R> void round_parts(int& phase, const std::vector<OneOf<T>>& parts, R& to, int panel) {
        alone([&] {
            b.begins.assign(1, 0);
            for (const OneOf<T>& part : parts) b.begins.push_back(b.begins.back() + up(part.rows, panel));
            to.reshape(b.begins.back(), parts[0].w->in);
        });
        share(phase, int(parts.size()), [&](int at) {
            for (int row = 0; row < parts[at].rows; row++) to.round(b.begins[at] + row, parts[at].x->at(row, 0), parts[at].w->in);
        });
    }
    template <class W> auto group_of(const OneOf<T>& part, int at, int row) {
        if constexpr (is_stored<W>) return b.rounded_parts.group(b.begins[at] + row);
        else if constexpr (std::is_same_v<W, HalfSums>) return b.half_parts.group(b.begins[at] + row);
        else return Group<T>{part.x->group(row), part.x->stride};
    }
    struct Idle {
        void operator()() {}
    };
    template <class W, class F> void products_of(int& phase, const std::vector<OneOf<T>>& parts, const F& put) {
        std::vector<int> ends;  // of the pieces of each
        for (const OneOf<T>& part : parts) {
            const int step = together<T>(part.rows);
            ends.push_back((ends.empty() ? 0 : ends.back()) + up(part.w->num_blocks(), step) / step);
        }
        alignas(64) float sums[MOST_ROWS * GROUP * BLOCK];
        Idle idle;
        share(phase, ends.empty() ? 0 : ends.back(), [&](int piece) {
            const int at = int(std::upper_bound(ends.begin(), ends.end(), piece) - ends.begin());
            const OneOf<T>& part = parts[at];
            const Matrix& w = *part.w;
            const int step = together<T>(part.rows), first = (piece - (at ? ends[at - 1] : 0)) * step;
            const int num_blocks = std::min(step, w.num_blocks() - first), from = first * BLOCK, count = std::min(num_blocks * BLOCK, w.out - from);
            const auto blocks = Blocks<W>::of(w, first);
            for (int row = 0; row < part.rows; row += MOST_ROWS) {
                const int num = std::min(MOST_ROWS, part.rows - row), wide = together<T>(num) * BLOCK;
                multiply_group(num, group_of<W>(part, at, row), blocks, num_blocks, blocks, sums, idle);
                for (int r = 0; r < num; r++) {
                    if (w.scales || w.bias) finish(w, from, count, sums + r * wide);
                    put(at, row + r, from, count, sums + r * wide);
                }
            }
        });
    }
    static void finish(const Matrix& w, int from, int count, float* at) {
        if (w.scales)
            for (int j = 0; j < count; j++) at[j] *= w.scales[from + j];
        if (w.bias)
            for (int j = 0; j < count; j++) at[j] += w.bias[from + j];
    }
};
