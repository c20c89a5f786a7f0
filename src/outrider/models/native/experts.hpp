// A mixture of experts in the place of an MLP: the twin of experts.py.
//
// The rows of a pass are laid out by expert, so that an expert's weights are read once for all rows that chose it, and not at all where
// nobody did. What experts return is added in the order of their numbers: a row's sums do not depend on who else chose them.
#pragma once
#include <algorithm>
#include <cmath>
#include <deque>
#include <vector>

#include "model.hpp"
#include "products.hpp"

struct Pick {
    int32_t expert, part, place;  // its row among those of its expert, which is the part-th that somebody chose
    float share;
};

// The choice of one row, from the router's scores
class ExpertChoice {
  public:
    void choose(const Experts& of, const float* scores, Pick* picks) {
        weigh(of, scores);
        choice.assign(scores, scores + of.count);
        for (int i = 0; of.correction && i < of.count; i++) choice[i] = weights[i] + of.correction[i];
        if (of.groups > 1) keep_best_groups(of);
        for (int i = 0; i < of.chosen; i++) {
            const int best = take_best(choice);
            picks[i] = {best, 0, 0, weights[best]};
        }
        std::sort(picks, picks + of.chosen, [](const Pick& a, const Pick& b) { return a.expert < b.expert; });
        float total = of.normalised ? 1e-20f : 1.0f;
        for (int i = 0; of.normalised && i < of.chosen; i++) total += picks[i].share;
        for (int i = 0; i < of.chosen; i++) picks[i].share = picks[i].share / total * of.scale;
    }

  private:
    void weigh(const Experts& of, const float* scores) {
        weights.resize(of.count);
        if (of.by_sigmoid) {
            for (int i = 0; i < of.count; i++) weights[i] = 1.0f / (1.0f + std::exp(-scores[i]));
            return;
        }
        const float top = *std::max_element(scores, scores + of.count);
        float total = 0;
        for (int i = 0; i < of.count; i++) total += weights[i] = std::exp(scores[i] - top);
        for (float& weight : weights) weight /= total;
    }
    // Experts come from the best groups only. A group is as good as its best experts together.
    void keep_best_groups(const Experts& of) {
        const int size = of.count / of.groups;
        std::vector<float> groups(of.groups), one;
        for (int group = 0; group < of.groups; group++) {
            one.assign(choice.begin() + group * size, choice.begin() + (group + 1) * size);
            for (int i = 0; i < of.group_best; i++) {
                groups[group] += *std::max_element(one.begin(), one.end());
                take_best(one);
            }
        }
        std::vector<bool> is_in(of.groups);
        for (int i = 0; i < of.chosen_groups; i++) is_in[take_best(groups)] = true;
        for (int i = 0; i < of.count; i++)
            if (!is_in[i / size]) choice[i] = -INFINITY;
    }
    static int take_best(std::vector<float>& values) {
        const auto best = std::max_element(values.begin(), values.end());
        *best = -INFINITY;
        return int(best - values.begin());
    }
    std::vector<float> weights, choice;
};

// Kept between passes
template <class T> class ExpertLayers {
  public:
    void reshape(const Model& m, int num_rows) {
        const Experts* some = nullptr;
        for (int i = 0; i < m.layers; i++) some = m.layer[i].experts ? m.layer[i].experts : some;
        if (!some) return;
        scores.grow(size_t(num_rows) * some->count), found.grow(size_t(num_rows) * some->chosen * m.hidden);
        picks.resize(size_t(num_rows) * some->chosen);
        while (int(inputs.size()) < some->count) inputs.emplace_back(), inner.emplace_back();
    }
    // wide = what the experts of each row make of x, and the MLP beside them
    template <class R> void feed(R& run, int& phase, const Experts& of, Inputs<T>& x) {
        const int hidden = run.m.hidden, num_rows = int(run.rows.size());
        run.product(phase, {of.router, of.gate_up[0], x, num_rows}, [&](int row, int from, int count) {
            float* to = scores.data() + size_t(row) * of.count + from;
            return [=, &of](int r, const float* at) { memcpy(to + size_t(r) * of.count, at, size_t(count) * 4); };
        });
        run.share(phase, num_rows, [&](int row) {
            static thread_local ExpertChoice choice;
            choice.choose(of, scores.data() + size_t(row) * of.count, &picks[size_t(row) * of.chosen]);
        });
        run.alone([&] { arrange(of, hidden); });
        run.share(phase, num_rows, [&](int row) {
            for (const Pick& pick : picks_of(of, row)) inputs[pick.part].copy(pick.place, x, row, hidden);
        });
        run.products(phase, first, [&](int part, int row, int from, int count, const float* at) {
            run.put_gated(inner[part], row, *first[part].w, from, count, at);
        });
        run.products(phase, second, [&](int part, int row, int from, int count, const float* at) {
            memcpy(found.data() + size_t(begins[part] + row) * hidden + from, at, size_t(count) * 4);
        });
        if (of.shared_gate_up.in) run.whole_mlp(phase, of.shared_gate_up, of.shared_down, x);
        run.share(phase, num_rows, [&](int row) {
            float* to = run.b.wide.data() + size_t(row) * hidden;
            if (!of.shared_gate_up.in) memset(to, 0, size_t(hidden) * 4);
            for (const Pick& pick : picks_of(of, row))
                run.add(to, found.data() + size_t(begins[pick.part] + pick.place) * hidden, hidden, pick.share);
        });
    }

  private:
    struct Picks {
        const Pick *first, *last;
        const Pick* begin() const { return first; }
        const Pick* end() const { return last; }
    };
    Picks picks_of(const Experts& of, int row) const {
        const Pick* begin = picks.data() + size_t(row) * of.chosen;
        return {begin, begin + of.chosen};
    }
    // Where the rows of every chosen expert lie
    void arrange(const Experts& of, int hidden) {
        std::vector<int> counts(of.count), part_of(of.count);
        for (Pick& pick : picks) pick.place = counts[pick.expert]++;
        first.clear(), second.clear(), begins.assign(1, 0);
        size_t room = 0, inner_room = 0;
        for (int expert = 0; expert < of.count; expert++) {
            if (!counts[expert]) continue;
            const int part = part_of[expert] = int(first.size());
            first.push_back({&of.gate_up[expert], &inputs[part], counts[expert]});
            second.push_back({&of.down[expert], &inner[part], counts[expert]});
            begins.push_back(begins.back() + counts[expert]);
            room += Inputs<T>::room(counts[expert], hidden), inner_room += Inputs<T>::room(counts[expert], of.down[expert].in);
        }
        auto *to = memory.grow(room), *inner_to = inner_memory.grow(inner_room);
        for (size_t part = 0; part < first.size(); part++) {
            to = inputs[part].lay(first[part].rows, hidden, to);
            inner_to = inner[part].lay(second[part].rows, second[part].w->in, inner_to);
        }
        for (Pick& pick : picks) pick.part = part_of[pick.expert];
    }
    Memory<float> scores, found;                             // [rows][experts]; [rows of all experts][hidden]
    Memory<typename Inputs<T>::Stored> memory, inner_memory;
    std::deque<Inputs<T>> inputs, inner;                     // what an expert multiplies first, and then
    std::vector<OneOf<T>> first, second;
    std::vector<int> begins;                                 // of the rows of each expert in `found`
    std::vector<Pick> picks;                                 // [rows][chosen]
};
