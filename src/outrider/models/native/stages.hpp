// Nanoseconds of the caller in each phase of a layer (the last: outside the layers), for profiling: -DOUTRIDER_STAGES.
#pragma once
constexpr int PHASES = 24;  // of a layer, at most

#if defined(OUTRIDER_STAGES)
#include <chrono>

extern "C" int64_t outrider_stages[PHASES + 1];
int64_t outrider_stages[PHASES + 1];

class Stage {
  public:
    Stage(int thread, int phase, int num_layers)
        : counts(thread == 0), spent(outrider_stages[phase < PHASES || phase >= PHASES * (num_layers + 1) ? PHASES : phase % PHASES]) {}
    ~Stage() {
        if (counts) spent += (std::chrono::steady_clock::now() - began).count();
    }

  private:
    const std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
    const bool counts;
    int64_t& spent;
};
#else
struct Stage {
    Stage(int, int, int) {}
};
#endif
