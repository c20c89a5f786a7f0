// Where sampling cuts a distribution off: the twin of core/truncation.py.
//
// PyTorch adds probabilities in another order, so a token whose place is decided by rounding may fall on the other side there.
// A cut therefore says which tokens it keeps, and of which of them it is sure.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.hpp"

extern "C" struct Cut {
    double top_p, typical_p;  // 1: all
    int32_t top_k;            // 0: all
    float min_p;
};

// Numbers in bins by their distance from the largest, so that few of them have to be sorted.
class Bins {
  public:
    void fill(const float* keys, const float* mass, int size, float least) {
        top = -INFINITY;
        for (int i = 0; i < size; i++) top = keys[i] > top ? keys[i] : top;
        begin.assign(COUNT + 1, 0), sums.assign(COUNT, 0.0), total = 0;
        places.resize(size);
        for (int i = 0; i < size; i++) {
            if (!(keys[i] >= least) || keys[i] == -INFINITY) { places[i] = -1; continue; }
            const float far = (top - keys[i]) * PER_UNIT;
            places[i] = far < COUNT - 1 ? int(far) : COUNT - 1;
            begin[places[i] + 1]++, sums[places[i]] += mass[i];
        }
        for (int bin = 0; bin < COUNT; bin++) begin[bin + 1] += begin[bin], total += sums[bin];
        this->keys = keys, this->mass = mass, this->size = size;
    }
    // The k-th largest
    float largest_but(int k) {
        int bin = 0;
        while (begin[bin + 1] < k) bin++;
        spread(bin, bin + 1);
        return keys[sorted(bin)[k - 1 - begin[bin]]];
    }
    // Walks down while what is left, this number included, is more than the share 1 - p of all; the doubt is about that share.
    struct Crossing { float last, sure, next; };  // the smallest that is kept, and is surely; the largest that is not
    Crossing crossing(double p, double doubt) {
        Crossing at{top, top, -INFINITY};
        double above = 0;
        int bin = 0, whole = -1;
        for (; bin < COUNT && (total - above - sums[bin]) / total > 1 - p + doubt; bin++) {
            above += sums[bin];
            if (begin[bin] < begin[bin + 1]) whole = bin;
        }
        spread(std::max(whole, 0), COUNT);
        if (whole >= 0) at.last = at.sure = keys[sorted(whole)[begin[whole + 1] - begin[whole] - 1]];
        for (; bin < COUNT; bin++) {
            const int* members = sorted(bin);
            for (int j = 0; j < begin[bin + 1] - begin[bin]; j++) {
                const float key = keys[members[j]];
                const double rest = (total - above) / total;
                if (above > 0 && rest <= 1 - p - doubt) { at.next = key; return at; }
                at.last = key;
                if (above == 0 || rest > 1 - p + doubt) at.sure = key;
                above += mass[members[j]];
            }
        }
        return at;
    }
    float top = 0;
    double total = 0;

  private:
    static constexpr int COUNT = 2048;
    static constexpr float PER_UNIT = 32;
    // Writes down who is in the bins from..end - 1
    void spread(int from, int end) {
        members.resize(begin[COUNT]), next.assign(begin.begin(), begin.end());
        for (int i = 0; i < size; i++)
            if (places[i] >= from && places[i] < end) members[next[places[i]]++] = i;
    }
    const int* sorted(int bin) {
        std::sort(members.begin() + begin[bin], members.begin() + begin[bin + 1], [&](int a, int b) { return keys[a] > keys[b]; });
        return members.data() + begin[bin];
    }
    const float *keys = nullptr, *mass = nullptr;
    int size = 0;
    std::vector<int> begin, members, next;
    std::vector<int16_t> places;
    std::vector<double> sums;
};

// Truncates tempered logits, whose memory ends with a whole vector of them. What is cut off becomes -infinity.
class Truncation {
  public:
    void apply(float* logits, int size, const Cut& cut) {
        sure = -INFINITY, is_doubtful = false, distances.clear();
        float least = -INFINITY;
        const bool weighs = cut.top_p < 1 || cut.typical_p < 1;
        shares.resize(up(size, LANES));
        if (weighs || cut.top_k > 0) weigh(logits, size);
        if (cut.top_k > 0 && cut.top_k < size) {
            bins.fill(logits, shares.data(), size, least);
            least = bins.largest_but(cut.top_k);
        }
        if (cut.top_p < 1) {
            bins.fill(logits, shares.data(), size, least);
            const auto at = bins.crossing(cut.top_p, DOUBT);
            least = std::max(least, at.last), sure = at.sure;
        }
        if (cut.min_p > 0) {
            const float from = *std::max_element(logits, logits + size) + std::log(cut.min_p), close = 1e-6f * (1 + std::fabs(from));
            least = std::max(least, from - close), sure = std::max(sure, from + close);
        }
        if (least > -INFINITY) {
            for (int i = 0; i < size; i++) {
                is_doubtful |= logits[i] >= least && logits[i] < sure;
                logits[i] = logits[i] >= least ? logits[i] : -INFINITY;
            }
        }
        if (cut.typical_p < 1) keep_typical(logits, size, cut.typical_p);
        else is_doubtful = false;
    }
    // PyTorch keeps this token too, whatever its rounding
    bool is_sure_of(int64_t token, float logit) const {
        return !is_doubtful && logit >= sure && (distances.empty() || distances[token] >= sure_distance);
    }

  private:
    static constexpr double DOUBT = 4e-6;         // of sums of probabilities that PyTorch adds in 32 bits
    static constexpr float CLOSE = 2e-5f;         // of surprisals
    // e^(logit - largest) of each
    void weigh(const float* logits, int size) {
        V most = splat(-INFINITY);
        for (int i = 0; i < size; i += LANES) most = max(most, load(logits + i));
        const V top = splat(largest(most));
        for (int i = 0; i < size; i += LANES) store(shares.data() + i, exp(load(logits + i) - top));
    }
    void keep_typical(float* logits, int size, double p) {
        weigh(logits, size);
        double total = 0, entropy = 0;
        const float top = *std::max_element(logits, logits + size);
        for (int i = 0; i < size; i++) total += shares[i];
        const float norm = float(std::log(total));
        for (int i = 0; i < size; i++) if (shares[i] > 0) entropy -= shares[i] / total * (logits[i] - top - norm);
        distances.resize(size);
        for (int i = 0; i < size; i++) distances[i] = -std::fabs(-(logits[i] - top - norm) - float(entropy));
        bins.fill(distances.data(), shares.data(), size, -INFINITY);
        const auto at = bins.crossing(p, DOUBT);
        sure_distance = at.last - at.next > CLOSE ? at.sure : std::max(at.sure, at.last + CLOSE);
        for (int i = 0; i < size; i++) logits[i] = distances[i] >= at.last ? logits[i] : -INFINITY;
    }
    Bins bins;
    std::vector<float> shares, distances;
    float sure = 0, sure_distance = 0;
    bool is_doubtful = false;
};
