// Best-first trees in one call: the twin of drafters/model/best_first.py.
//
// Level by level the most promising candidates of every row are fed to the model together; each one's likeliest successors join
// the pool with the chance that the text passes through them; the best of the pool are the tree.
#pragma once
#include <algorithm>
#include <vector>

#include "cut.hpp"
#include "noise.hpp"

extern "C" struct Tree {
    int32_t longest, width, children, capacity;  // capacity: nodes of a row in the arrays below
    float tau;
    const int32_t *depths, *sizes;     // [batch] the deepest guess and the most guesses
    const float* temperatures;         // [batch]
    const int64_t *seeds, *positions;  // [batch] whose noise, and the output position of the first guess
    int64_t *tokens, *parents;         // [batch][capacity] the tree, the root first (its token is the caller's)
    int64_t* numbers;                  // [batch][capacity] of each node among the nodes fed after the root, from 1; 0: not fed
    int32_t* counts;                   // [batch] nodes, the root included
    const Cut* cuts;                   // [batch] or null
};

struct Candidate {
    int64_t token;
    int parent, depth, number;  // parent: place in the pool; number: as above
    float chance;               // log
};

struct Likeliest {
    int64_t token;
    float score;
};

// The `count` best of scores, ties to the smaller token, and ln of the sum of e^(score - best), divided by tau throughout.
static float pick(const float* scores, int size, int count, float tau, Likeliest* best) {
    int found = 0;
    for (int i = 0; i < size; i += LANES) {
        const int end = std::min(size, i + LANES);
        if (found == count && i + LANES <= size) {  // most stretches hold nothing better than the worst of the best
            if (!(largest(load(scores + i)) > best[count - 1].score)) continue;
        }
        for (int j = i; j < end; j++) {
            if (found == count && !(scores[j] > best[count - 1].score)) continue;
            int at = found < count ? found++ : count - 1;
            for (; at > 0 && scores[j] > best[at - 1].score; at--) best[at] = best[at - 1];
            best[at] = {j, scores[j]};
        }
    }
    const float top = best[0].score, scale = 1.0f / tau;
    V total = {};
    float rest = 0;
    int i = 0;
    for (; i + LANES <= size; i += LANES) total += exp((load(scores + i) - top) * scale);
    for (; i < size; i++) rest += std::exp((scores[i] - top) * scale);
    return std::log(sum(total) + rest);
}

class RowGrowth {
  public:
    std::vector<Candidate> pool;
    std::vector<int> frontier;  // places in the pool, in order

    RowGrowth(const Tree& tree, int row) : pool(1, Candidate{0, -1, 0, 0, 0.0f}), frontier(1, 0), t(tree), row(row) {}

    bool goes_on(int depth) const { return depth < t.depths[row]; }

    // Candidates below the frontier, whose logits [frontier][vocab] are given; the noise is that of one position.
    void add(float* logits, int vocab, int depth) {
        const float temperature = t.temperatures[row];
        if (temperature > 0) {
            noise.resize(up(vocab, 8));
            gumbel_stream(noise_key(t.seeds[row], t.positions[row] + depth), vocab, noise.data());
        }
        std::vector<Likeliest> best(t.children);
        for (size_t f = 0; f < frontier.size(); f++) {
            float* scores = logits + f * vocab;
            if (temperature > 0) {
                const float least = t.cuts ? threshold.of(scores, vocab, temperature, t.cuts[row]) : -INFINITY;
                for (int i = 0; i < vocab; i++) scores[i] = scores[i] < least ? -INFINITY : scores[i] + temperature * noise[i];
            }
            const int count = std::min(t.children, vocab);
            const float norm = pick(scores, vocab, count, t.tau, best.data());
            for (int c = 0; c < count; c++) {
                const float chance = std::min(0.0f, (best[c].score - best[0].score) / t.tau - norm);
                pool.push_back({best[c].token, frontier[f], depth + 1, 0, pool[frontier[f]].chance + chance});
            }
        }
    }
    // The best `width` candidates from `begin` on become the frontier.
    void choose(size_t begin, int& numbered) {
        frontier.clear();
        for (size_t i = begin; i < pool.size(); i++) frontier.push_back(int(i));
        std::stable_sort(frontier.begin(), frontier.end(), [&](int a, int b) { return pool[a].chance > pool[b].chance; });
        if (int(frontier.size()) > t.width) frontier.resize(t.width);
        std::sort(frontier.begin(), frontier.end());
        for (int place : frontier) pool[place].number = ++numbered;
    }
    void write() {
        std::vector<int> order(pool.size()), moved(pool.size(), -1);
        for (size_t i = 0; i < pool.size(); i++) order[i] = int(i);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return pool[a].chance > pool[b].chance; });
        const size_t kept = std::min(pool.size(), size_t(t.sizes[row]) + 1);
        order.resize(kept);
        std::sort(order.begin(), order.end());
        const size_t base = size_t(row) * t.capacity;
        for (size_t i = 0; i < kept; i++) {
            const Candidate& one = pool[order[i]];
            moved[order[i]] = int(i);
            t.tokens[base + i] = one.token;
            t.parents[base + i] = one.parent < 0 ? -1 : moved[one.parent];
            t.numbers[base + i] = one.number;
        }
        t.counts[row] = int32_t(kept);
    }

  private:
    const Tree& t;
    const int row;
    std::vector<float> noise;
    Threshold threshold;
};
