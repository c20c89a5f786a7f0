// Nanoseconds of the caller in each phase of a layer (the sixteenth: outside the layers), for profiling: -DOUTRIDER_STAGES.
#pragma once
#if defined(OUTRIDER_STAGES)
#include <chrono>

extern "C" int64_t outrider_stages[17];
int64_t outrider_stages[17];

class Stage {
  public:
    Stage(int thread, int phase, int num_layers)
        : counts(thread == 0), spent(outrider_stages[phase < 16 || phase >= 16 * (num_layers + 1) ? 16 : phase % 16]) {}
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
