// Best-first trees in one call: the twin of drafters/trees/best_first.py.
//
// Level by level the most promising candidates of every row are fed to the model together; each one's likeliest successors join
// the pool with the chance that the text passes through them; the best of the pool are the tree, or the best whole paths (beams).
#pragma once
#include <algorithm>
#include <vector>

#include "sampler.hpp"

extern "C" struct Tree {
    int32_t longest, width, children, capacity;  // capacity: nodes of a row in the arrays below
    float tau;
    const int32_t *depths, *sizes;     // [batch] the deepest guess and the most guesses
    const Shaping* shaping;
    const int64_t *seeds, *positions;  // [batch] whose noise, and the output position of the first guess
    int64_t *tokens, *parents;         // [batch][capacity] the tree, the root first (its token is the caller's)
    int64_t* numbers;                  // [batch][capacity] of each node among the nodes fed after the root, from 1; 0: not fed
    int32_t* counts;                   // [batch] nodes, the root included
    const int64_t* ids;                // the target's token for each of the model's, or null where they are the same
    int32_t in_beams;                  // whole paths, the likeliest first (drafters/heads/redrafter.py)
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

// A model's logits in place of the target's tokens. What it cannot say is never guessed.
static const float* over_target(const float* logits, int vocab, const int64_t* ids, int said, std::vector<float>& spread) {
    if (!ids) return logits;
    spread.assign(said, -INFINITY);
    for (int i = 0; i < vocab; i++) spread[ids[i]] = logits[i];
    return spread.data();
}

class RowGrowth {
  public:
    std::vector<Candidate> pool;
    std::vector<int> frontier;  // places in the pool, in order

    RowGrowth(const Tree& tree, int row) : pool(1, Candidate{0, -1, 0, 0, 0.0f}), frontier(1, 0), t(tree), row(row), shaper(*tree.shaping) {}

    bool goes_on(int depth) const { return depth < t.depths[row]; }

    // Candidates below the frontier, whose logits stand `stride` apart (0: all have the same); the noise is that of one position.
    void add(const float* logits, int vocab, size_t stride, int depth) {
        const float temperature = shaper.temperature(row);
        const int said = t.ids ? t.shaping->vocab : vocab;
        if (temperature > 0) {
            noise.resize(up(said, 8));
            gumbel_stream(noise_key(t.seeds[row], t.positions[row] + depth), said, noise.data());
        }
        std::vector<Likeliest> best(t.children);
        const int count = std::min(t.children, vocab);
        const bool is_shared = stride == 0 && !shaper.reads_paths();
        float norm = 0;
        for (size_t f = 0; f < frontier.size(); f++) {
            if (f == 0 || !is_shared) {
                path.clear();
                for (int at = frontier[f]; at > 0; at = pool[at].parent) path.push_back(pool[at].token);
                const float* spoken = over_target(logits + f * stride, vocab, t.ids, said, spread);
                const float* law = shaper.law(row, spoken, said, {depth, path.data(), nullptr});
                scores.assign(law, law + said);
                if (temperature > 0) for (int i = 0; i < said; i++) scores[i] = temperature * (law[i] + noise[i]);
                norm = pick(scores.data(), said, count, t.tau, best.data());
            }
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
        std::vector<int> moved(pool.size(), -1), kept = t.in_beams ? beams() : best();
        std::sort(kept.begin(), kept.end());
        const size_t base = size_t(row) * t.capacity;
        for (size_t i = 0; i < kept.size(); i++) {
            const Candidate& one = pool[kept[i]];
            moved[kept[i]] = int(i);
            t.tokens[base + i] = one.token;
            t.parents[base + i] = one.parent < 0 ? -1 : moved[one.parent];
            t.numbers[base + i] = one.number;
        }
        t.counts[row] = int32_t(kept.size());
    }

  private:
    std::vector<int> likeliest() const {
        std::vector<int> order(pool.size());
        for (size_t i = 0; i < pool.size(); i++) order[i] = int(i);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return pool[a].chance > pool[b].chance; });
        return order;
    }
    std::vector<int> best() const {
        std::vector<int> order = likeliest();
        order.resize(std::min(pool.size(), size_t(t.sizes[row]) + 1));
        return order;
    }
    // Whole paths while all of the next one fits. The first is cut to what fits.
    std::vector<int> beams() const {
        const size_t room = size_t(t.sizes[row]);
        std::vector<int> kept(1, 0);
        std::vector<bool> is_kept(pool.size());
        is_kept[0] = true;
        for (int end : likeliest()) {
            if (end == 0 || pool[end].depth != t.depths[row]) continue;
            std::vector<int> up;
            for (int at = end; !is_kept[at]; at = pool[at].parent) up.push_back(at);
            if (kept.size() == 1 && up.size() > room) up.erase(up.begin(), up.end() - room);
            if (kept.size() - 1 + up.size() > room) break;
            for (int at : up) kept.push_back(at), is_kept[at] = true;
        }
        return kept;
    }
    const Tree& t;
    const int row;
    Shaper shaper;
    std::vector<float> noise, scores, spread;
    std::vector<int64_t> path;
};
