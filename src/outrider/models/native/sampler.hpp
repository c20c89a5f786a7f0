// From a model's logits to the law of a request, and the choices of it: the twin of core/sampling.py.
#pragma once
#include "cut.hpp"
#include "noise.hpp"
#include "walk.hpp"

// What shapes the laws of B rows. Arrays are [batch][vocab], or null where no row has such a thing.
extern "C" struct Shaping {
    int32_t vocab;
    const float* temperatures;             // [batch]
    const Cut* cuts;                       // [batch] or null
    const float* bias;                     // added
    const uint8_t* ends;                   // tokens that may not come before
    const int64_t* missing;                // [batch] so many others
    const float* penalties;                // [batch][3]: repetition, presence, frequency
    const float* in_output;                // how often each token came
    const uint8_t* in_prompt;
};

class Shaper {
  public:
    explicit Shaper(const Shaping& shaping) : s(shaping) {}
    float temperature(int row) const { return s.temperatures[row]; }
    // What `path` adds to the text of the row, and what a grammar allows there (null: everything)
    struct Place {
        int depth;
        const int64_t* path;
        const uint8_t* allowed;
    };
    // Tempered logits, -infinity where the law has no token; at temperature 0 as they are. They stay until the next call.
    const float* law(int row, const float* logits, int size, const Place& place) {
        const int room = up(size, LANES);
        found.assign(logits, logits + size), found.resize(room, -INFINITY);
        adjust(row, size, place);
        if (s.temperatures[row] == 0) return found.data();
        const float heat = s.temperatures[row];
        for (int i = 0; i < size; i++) found[i] /= heat;
        if (s.cuts) truncation.apply(found.data(), size, s.cuts[row]);
        return found.data();
    }
    // PyTorch would choose it too: no rounding of a cut decides about it
    bool is_sure_of(int row, int64_t token) const {
        return !s.cuts || s.temperatures[row] == 0 || truncation.is_sure_of(token, found[token]);
    }
    bool is_cut(int row) const {
        if (!s.cuts) return false;
        const Cut& cut = s.cuts[row];
        return cut.top_k > 0 || cut.top_p < 1 || cut.min_p > 0 || cut.typical_p < 1;
    }
    bool changes_order() const { return s.bias || s.ends || s.penalties; }
    bool reads_paths() const { return s.penalties; }

  private:
    void adjust(int row, int size, const Place& place) {
        const size_t base = size_t(row) * s.vocab;
        float* x = found.data();
        if (place.allowed) for (int i = 0; i < size; i++) x[i] = place.allowed[i] ? x[i] : -INFINITY;
        if (s.bias) for (int i = 0; i < size; i++) x[i] += s.bias[base + i];
        if (s.ends && place.depth < s.missing[row])
            for (int i = 0; i < size; i++) x[i] = s.ends[base + i] ? -INFINITY : x[i];
        if (s.penalties) penalise(row, size, place);
    }
    void penalise(int row, int size, const Place& place) {
        const size_t base = size_t(row) * s.vocab;
        if (row != counted_row) {
            counted.clear(), counted_row = row;
            for (int i = 0; i < size; i++) if (s.in_output[base + i] > 0 || s.in_prompt[base + i]) counted.push_back(i);
        }
        const float* penalty = s.penalties + 3 * row;
        on_path.clear();
        for (int i = 0; i < place.depth; i++) {
            const int64_t token = place.path[i];
            const float more = float(std::count(place.path, place.path + place.depth, token));
            if (token < size) on_path.push_back({token, penalised(found[token], s.in_output[base + token] + more, penalty)});
        }
        for (int token : counted) found[token] = penalised(found[token], s.in_output[base + token], penalty);
        for (const auto& one : on_path) found[one.token] = one.logit;
    }
    // Products are rounded before they are subtracted, as in PyTorch
    static float penalised(float logit, float count, const float* penalty) {
        logit = logit > 0 ? logit / penalty[0] : logit * penalty[0];
        volatile const float for_count = penalty[2] * count;
        logit -= for_count;
        return count > 0 ? logit - penalty[1] : logit;
    }
    struct Penalised {
        int64_t token;
        float logit;
    };
    const Shaping& s;
    Truncation truncation;
    std::vector<float> found;
    std::vector<int> counted;
    std::vector<Penalised> on_path;
    int counted_row = -1;
};

// The target's choices after nodes start.. of B trees.
extern "C" struct Choices {
    int32_t batch, nodes, start, vocab;
    const float* logits;               // [batch][nodes - start][vocab]
    const int64_t *tokens, *parents;   // [batch][nodes]; parents are null for chains
    const Shaping* shaping;
    const int64_t *seeds, *positions;  // [batch] or null where every temperature is 0
    const uint8_t* const* allowed;     // [batch][nodes - start] masks of grammars, or null
    int64_t* out;                      // [batch][nodes - start]; -1 where rounding decides
    const int32_t* sizes;              // [batch] of the trees
    int64_t* walks;                    // [batch][WALK_HEAD + nodes] the walk of each row (walk.hpp), written if all is decided; or null
};
class Chooser {
  public:
    explicit Chooser(const Choices& choices) : c(choices), shaper(*choices.shaping) {}
    int run() {  // how many were not decided
        int open = 0;
        for (int b = 0; b < c.batch; b++) {
            known = -1;
            for (int n = c.start; n < c.nodes; n++) {
                const size_t at = size_t(b) * (c.nodes - c.start) + n - c.start;
                c.out[at] = chosen(b, n, c.logits + at * c.vocab, c.allowed ? c.allowed[at] : nullptr);
                open += c.out[at] < 0;
            }
        }
        if (c.walks && !open) walk();
        return open;
    }

  private:
    void walk() const {
        Walk walk;
        for (int b = 0; b < c.batch; b++) {
            const size_t at = size_t(b) * c.nodes;
            walk.follow(c.tokens + at, c.parents ? c.parents + at : nullptr, c.sizes[b], c.out + at, c.walks + at + size_t(b) * WALK_HEAD);
        }
    }
    int64_t chosen(int row, int node, const float* logits, const uint8_t* allowed) {
        const bool is_greedy = shaper.temperature(row) == 0;
        if (is_greedy && !allowed && !shaper.changes_order()) return first_best(logits, c.vocab);
        path.clear();
        for (int at = node; at > 0; at = c.parents ? int(c.parents[size_t(row) * c.nodes + at]) : at - 1)
            path.push_back(c.tokens[size_t(row) * c.nodes + at]);
        const int depth = int(path.size());
        const float* law = shaper.law(row, logits, c.vocab, {depth, path.data(), allowed});
        if (is_greedy) return first_best(law, c.vocab);
        const uint64_t key = noise_key(c.seeds[row], c.positions[row] + depth);
        const int64_t token = shaper.is_cut(row) ? choice(law, c.vocab, key) : chosen_of_all(law, key, depth);
        return shaper.is_sure_of(row, token) ? token : -1;
    }
    // Nodes of one depth stand together, and need the same noise
    int64_t chosen_of_all(const float* law, uint64_t key, int depth) {
        noise.resize(c.vocab), scores.resize(c.vocab);
        if (depth != known) gumbel_stream(key, c.vocab, noise.data());
        known = depth;
        for (int i = 0; i < c.vocab; i++) scores[i] = law[i] + noise[i];
        return first_best(scores.data(), c.vocab);
    }
    const Choices& c;
    Shaper shaper;
    std::vector<int64_t> path;
    std::vector<float> noise, scores;
    int known = -1;
};
