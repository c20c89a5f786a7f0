// Where sampling cuts a distribution off: the twin of core/truncation.py, as a threshold on the logit.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vector.hpp"

extern "C" struct Cut {
    int32_t top_k;  // 0: all
    float top_p, min_p;
};

// The smallest logit that is kept; ties are kept.
class Threshold {
  public:
    float of(const float* logits, int size, float temperature, const Cut& cut) {
        if (temperature == 0) return -INFINITY;
        kept.assign(logits, logits + size);
        const float top = *std::max_element(kept.begin(), kept.end());
        float least = -INFINITY;
        if (cut.top_k > 0 && cut.top_k < size) {
            std::nth_element(kept.begin(), kept.begin() + (cut.top_k - 1), kept.end(), std::greater<float>());
            least = kept[cut.top_k - 1];
        }
        if (cut.top_p < 1) least = std::max(least, nucleus(least, top, temperature, cut.top_p));
        if (cut.min_p > 0) least = std::max(least, top + temperature * std::log(cut.min_p));
        return least;
    }

  private:
    // The logit at which the probabilities of those from `least` on, largest first, add up to p
    float nucleus(float least, float top, float temperature, float p) {
        kept.erase(std::remove_if(kept.begin(), kept.end(), [&](float x) { return x < least; }), kept.end());
        double total = 0, sum = 0;
        for (float x : kept) total += std::exp((x - top) / temperature);
        size_t sorted = 0;
        for (size_t i = 0; i < kept.size(); i++) {
            if (i == sorted) {  // few are needed as a rule
                sorted = std::min(kept.size(), sorted ? 8 * sorted : 64);
                std::partial_sort(kept.begin() + i, kept.begin() + sorted, kept.end(), std::greater<float>());
            }
            sum += std::exp((kept[i] - top) / temperature);
            if (sum >= p * total) return kept[i];
        }
        return -INFINITY;
    }
    std::vector<float> kept;
};
