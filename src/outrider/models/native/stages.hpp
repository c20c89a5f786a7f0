// Nanoseconds of the caller in each phase of a layer (the last: outside the layers), for profiling: -DOUTRIDER_STAGES.
#pragma once
constexpr int PHASES = 24;  // of a layer, at most

#if defined(OUTRIDER_STAGES)
#include <ctime>

extern "C" int64_t outrider_stages[PHASES + 1];
int64_t outrider_stages[PHASES + 1];

class Stage {
  public:
    Stage(int thread, int phase, int num_layers)
        : counts(thread == 0), spent(outrider_stages[phase < PHASES || phase >= PHASES * (num_layers + 1) ? PHASES : phase % PHASES]) {}
    ~Stage() {
        if (counts) spent += now() - began;
    }

  private:
    static int64_t now() {  // of this thread, so that other work on the machine does not count
        timespec at;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
        return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
    }
    const int64_t began = now();
    const bool counts;
    int64_t& spent;
};
#else
struct Stage {
    Stage(int, int, int) {}
};
#endif
