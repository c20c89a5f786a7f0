// Attention of nodes over their own past: the committed slots of their row, then their ancestors' slots, themselves last.
// No mask exists. Keys are taken in order of position, so the additions are those of plain decoding whatever the tree. Nodes of one
// tree see much the same keys and values, which are read once for all of their queries.
//
// A past is taken KEYS_AT_ONCE keys at a time, counted from its first: these are scored, weighed against the largest score so far, and
// their values blended. Where a larger score comes, what was found before is made smaller. So scores, keys and values stay in a near cache
// however long the past is, and where the pieces end depends on nothing but a node's own past.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vector.hpp"

constexpr int MAX_TOGETHER = 4;   // queries that share one reading of the values
constexpr int MOST_LOOKING = 64;  // queries of a piece of work, at most
constexpr int KEYS_AT_ONCE = 512;  // their values are brought near while they are scored: a second-level cache holds them
constexpr int VALUES_AT_ONCE = 64;  // for all queries: a first-level cache holds them

// Keys or values of one row and head, page by page.
template <class T> struct Slots {
    T* first;  // the head's part of page 0
    const int32_t* pages;
    size_t apart;  // from a page to the next
    int bits, dim;  // log2 of a page's tokens
    T* at(int slot) const { return first + size_t(pages[slot >> bits]) * apart + size_t(slot & ((1 << bits) - 1)) * dim; }
    int end(int slot) const { return ((slot >> bits) + 1) << bits; }  // of the page that holds it
};
template <class T> struct Past {
    Slots<T> keys, values;
    int dim;
    int begin, committed;  // slots [begin, committed) are seen
    const int32_t* ancestors;  // slots seen after them, in order
    int num_ancestors;
    int origin;  // position of the first key that is seen
    int seen;    // dimensions of a value that are blended, a multiple of 16
    int size() const { return committed - begin + num_ancestors; }
    int slot(int i) const { return begin + i < committed ? begin + i : ancestors[begin + i - committed]; }
    const T* value(int i) const { return values.at(slot(i)); }
    // Sixteen values, and the keys after those of the same nodes, on their way to the near caches
    void bring(int i, int to) const {
        for (int j = i; j < std::min(i + LANES, to); j++) {
            const char* value_at = reinterpret_cast<const char*>(value(j));
            const char* key_at = reinterpret_cast<const char*>(keys.at(slot(std::min(j + LANES, to - 1))));
            for (size_t line = 0; line < dim * sizeof(T); line += 64) __builtin_prefetch(value_at + line, 0, 2), __builtin_prefetch(key_at + line, 0, 3);
        }
    }
    int run(int i, int to) const {  // values from i on that lie one after the other end there
        int end = std::max(i + 1, std::min(to, committed - begin));
        while (end < to && slot(end) == slot(end - 1) + 1) end++;
        return std::min(end, i + values.end(slot(i)) - slot(i));
    }
};

// Fewer queries than are best at once
template <int Q, class T> static void rest_of_dots(const float* const* queries, const T* const* keys, int dim, int count, V* found) {
    if constexpr (Q > 0) {
        if (count == Q) dots<Q>(queries, keys, dim, found);
        else rest_of_dots<Q - 1>(queries, keys, dim, count, found);
    }
}
// scores[n][i - first] = scale * query_n . key_i for keys [from, to), sixteen at a time; past the end the last key again
template <class T>
static void score_keys(const Past<T>& past, int first, int from, int to, const float* const* queries, int count, float scale, float* scores, int stride) {
    for (int i = from; i < to; i += LANES) {
        const T* keys[LANES];
        for (int j = 0; j < LANES; j++) keys[j] = past.keys.at(past.slot(std::min(i + j, to - 1)));
        past.bring(i, to);
        const auto put = [&](int n, V found) { store(scores + size_t(n) * stride + i - first, scale * found); };
        if constexpr (LEAST_ACROSS > 0)
            if (count >= LEAST_ACROSS && past.dim <= MOST_ACROSS) {
                dots_across(queries, count, keys, past.dim, put);
                continue;
            }
        V found[QUERIES_AT_ONCE];
        int n = 0;
        for (; n + QUERIES_AT_ONCE <= count; n += QUERIES_AT_ONCE) {
            dots<QUERIES_AT_ONCE>(queries + n, keys, past.dim, found);
            for (int q = 0; q < QUERIES_AT_ONCE; q++) put(n + q, found[q]);
        }
        rest_of_dots<QUERIES_AT_ONCE - 1>(queries + n, keys, past.dim, count - n, found);
        for (int q = 0; n + q < count; q++) put(n + q, found[q]);
    }
}

// What a query found so far: its largest score, and the sum of all weights
struct Softened {
    float most, total;
    explicit Softened(float sink) : most(sink), total(sink > -INFINITY ? 1.0f : 0.0f) {}
    // scores -> e^(score - most), zero from `size` on to the next multiple of 16; `out` is what was blended before
    void add(float* scores, int size, float cap, float* out, int dim) {
        const int padded = up(size, LANES);
        for (int i = size; i < padded; i++) scores[i] = -INFINITY;
        V highest = splat(-INFINITY);
        for (int i = 0; i < padded; i += LANES) {
            V s = load(scores + i);
            if (cap > 0) s = select(s > splat(-INFINITY), cap * tanh(s / cap), s), store(scores + i, s);
            highest = max(highest, s);
        }
        raise(largest(highest), out, dim);
        const V top = splat(most);
        V sum_of = {};
        for (int i = 0; i < padded; i += LANES) {
            const V weight = exp(load(scores + i) - top);
            store(scores + i, weight);
            sum_of += weight;
        }
        total += sum(sum_of);
    }

  private:
    void raise(float score, float* out, int dim) {
        if (score <= most) return;
        const float smaller = std::exp(most - score);
        most = score, total *= smaller;
        for (int i = 0; i < dim; i += LANES) store(out + i, load(out + i) * smaller);
    }
};

// out[n] += sum of weights[n][i - from] value_i over keys [from, to), for N queries, 16 * C dimensions at a time
template <class T, int N, int C>
static void blend(const Past<T>& past, int from, int to, const float* weights, int stride, int first, float* out) {
    V acc[N][C];
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) acc[n][c] = load(out + size_t(n) * past.seen + first + c * LANES);
    for (int i = from, end = 0; i < to; i = end) {
        const T* value = past.value(i) + first;
        end = past.run(i, to);
        for (int j = i; j < end; j++, value += past.dim) {
            V parts[C];
            for (int c = 0; c < C; c++) parts[c] = load(value + c * LANES);
            for (int n = 0; n < N; n++)
                for (int c = 0; c < C; c++) acc[n][c] += weights[size_t(n) * stride + j - from] * parts[c];
        }
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) store(out + size_t(n) * past.seen + first + c * LANES, acc[n][c]);
}
template <class T, int N> static void blend_some(const Past<T>& past, int from, int to, const float* weights, int stride, float* out) {
    constexpr int C = std::max(1, std::min(4, std::max(ACCUMULATORS, MOST_TOGETHER) / N));
    int first = 0;
    for (; first + C * LANES <= past.seen; first += C * LANES) blend<T, N, C>(past, from, to, weights, stride, first, out);
    for (; first < past.seen; first += LANES) blend<T, N, 1>(past, from, to, weights, stride, first, out);
}
// The same for two to four queries: values that lie one after the other are the rows of a matrix. A panel has four rows: those that are
// not there are the last one, whose sums go to where nobody looks.
template <int N> static void blend_panels(const Past<float>& past, int from, int to, const float* weights, int stride, float* out) {
    static thread_local Memory<float> nowhere;
    float* const unseen = N < 4 ? nowhere.grow(size_t(past.seen)) : nullptr;
    const auto row = [&](int n, int i) { return weights + size_t(std::min(n, N - 1)) * stride + i - from; };
    const auto place = [&](int n, int d) { return (n < N ? out + size_t(n) * past.seen : unseen) + d; };
    for (int i = from, end = 0; i < to; i = end) {
        end = past.run(i, to);
        const int whole = (end - i) / 4 * 4;
        for (int d = 0; whole && d < past.seen; d += LANES)
            multiply_panel({row(0, i), row(1, i), row(2, i), row(3, i)}, past.value(i) + d, past.dim, whole,
                           {place(0, d), place(1, d), place(2, d), place(3, d)}, {reinterpret_cast<const char*>(past.value(i) + d + 24 * past.dim), int(past.dim * sizeof(float))});
        if (i + whole < end) blend_some<float, N>(past, i + whole, end, weights + i + whole - from, stride, out);
    }
}
template <class T, int N> static void blend_rows(const Past<T>& past, int from, int to, const float* weights, int stride, float* out) {
    if constexpr (HAS_PANELS && N > 1 && std::is_same_v<T, float>) blend_panels<N>(past, from, to, weights, stride, out);
    else blend_some<T, N>(past, from, to, weights, stride, out);
}
template <class T> static void blend_all(const Past<T>& past, int from, int to, int count, const float* weights, int stride, float* out) {
    if (from == to) return;
    for (int n = 0; n < count; n += MAX_TOGETHER) {
        const float* some = weights + size_t(n) * stride;
        float* at = out + size_t(n) * past.seen;
        switch (std::min(MAX_TOGETHER, count - n)) {
            case 4: blend_rows<T, 4>(past, from, to, some, stride, at); break;
            case 3: blend_rows<T, 3>(past, from, to, some, stride, at); break;
            case 2: blend_rows<T, 2>(past, from, to, some, stride, at); break;
            default: blend_rows<T, 1>(past, from, to, some, stride, at);
        }
    }
}

// The queries of one key head at some nodes of a tree
template <class T> struct Looking {
    const Past<T>* pasts;         // [rows]
    const float* const* queries;  // [rows][heads]
    int rows, heads;
    const float* sinks = nullptr;  // [heads] or null
    // Keys at the beginning of all pasts: they are read once for all queries.
    int shared() const {
        const Past<T>& one = pasts[0];
        int same = one.num_ancestors;
        for (int r = 1; r < rows; r++) {
            const Past<T>& other = pasts[r];
            if (other.begin != one.begin || other.origin != one.origin) return 0;
            same = std::min(same, other.num_ancestors);
            for (int i = 0; i < same; i++)
                if (other.ancestors[i] != one.ancestors[i]) same = i;
        }
        return one.committed - one.begin + same;
    }
};
static inline std::vector<Softened>& softened() {
    static thread_local std::vector<Softened> memory;
    return memory;
}
constexpr int SCORE_STRIDE = KEYS_AT_ONCE + LANES;
// out: [rows][heads][seen]. `space` holds rows * heads * stride floats; a stride is at least sixteen more than the longest past, or SCORE_STRIDE.
template <class T> static void attend(const Looking<T>& looking, float scale, float cap, float* space, int stride, float* out) {
    const int heads = looking.heads, count = looking.rows * heads, dim = looking.pasts[0].seen, shared = looking.shared();
    std::vector<Softened>& found = softened();
    int longest = 0;
    found.clear();
    for (int n = 0; n < count; n++) {
        found.emplace_back(looking.sinks ? looking.sinks[n % heads] : -INFINITY);
        longest = std::max(longest, looking.pasts[n / heads].size());
    }
    std::fill(out, out + size_t(count) * dim, 0.0f);
    for (int first = 0; first < longest; first += KEYS_AT_ONCE) {
        const int common = std::clamp(shared, first, first + KEYS_AT_ONCE);
        const auto own = [&](auto work) {
            for (int r = 0; r < looking.rows; r++) work(looking.pasts[r], r * heads, std::min(looking.pasts[r].size(), first + KEYS_AT_ONCE));
        };
        score_keys(looking.pasts[0], first, first, common, looking.queries, count, scale, space, stride);
        own([&](const Past<T>& past, int n, int end) {
            score_keys(past, first, common, end, looking.queries + n, heads, scale, space + size_t(n) * stride, stride);
            for (int h = n; h < n + heads && end > first; h++) found[h].add(space + size_t(h) * stride, end - first, cap, out + size_t(h) * dim, dim);
        });
        for (int i = first; i < common; i += VALUES_AT_ONCE)
            blend_all(looking.pasts[0], i, std::min(i + VALUES_AT_ONCE, common), count, space + i - first, stride, out);
        own([&](const Past<T>& past, int n, int end) {
            if (end > common) blend_all(past, common, end, heads, space + size_t(n) * stride + common - first, stride, out + size_t(n) * dim);
        });
    }
    for (int n = 0; n < count; n++)
        for (int i = n * dim; i < (n + 1) * dim; i += LANES) store(out + i, load(out + i) / found[n].total);
}
