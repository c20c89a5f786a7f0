// How the threads of a pass share the pieces of a phase: each has a run of them and helps the others when it is done.
#pragma once
#include <atomic>

#include "pass_buffers.hpp"
#include "pool.hpp"
#include "stages.hpp"

static thread_local int this_thread = 0;

constexpr int64_t BACK = int64_t(1) << 32;  // one piece taken from the back of a run

template <class T> class PassThreads {
  public:
    PassThreads(const Model& model, const Pass& pass, Buffers<T>& buffers)
        : m(model), p(pass), b(buffers), pool(Pool::of(pass.num_threads)), list(m, p, pool.size()) {}

    // Runs work(thread) on every thread. All go through at most so many phases.
    template <class F> void on_all(int num_phases, F work) {
        counters = std::vector<std::atomic<int64_t>>(size_t(num_phases) * pool.size());
        pool.run([&](int thread) {
            this_thread = thread;
            work(thread);
            release_tiles();
        });
    }
    template <class B> static void grow(B& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    }
    float* residual(int row) { return b.residual.data() + size_t(row) * m.hidden; }

    // Pieces 0 .. count - 1 of this phase: every thread has a run of them, and helps the others when it is done. Then all meet.
    template <class F> void share(int& phase, int count, F piece) {
        share(phase, count, piece, [] {});
    }
    template <class F, class L> void share(int& phase, int count, F piece, L at_last) {
        const int num_threads = pool.size();
        const Stage stage(this_thread, phase, p.last_layer - p.first_layer);
        std::atomic<int64_t>* taken = &counters[size_t(phase++) * num_threads];
        for (int turn = 0; turn < num_threads; turn++) {
            const int owner = (this_thread + turn) % num_threads, begin = count * owner / num_threads;
            const int size = count * (owner + 1) / num_threads - begin;
            for (;;) {  // the owner takes from the front, the others from the back: what each fetches ahead stays its own
                const int64_t was = taken[owner].fetch_add(turn ? BACK : 1, std::memory_order_relaxed);
                const int front = int(was % BACK), back = int(was / BACK);
                if (front + back >= size) break;
                piece(begin + (turn ? size - 1 - back : front));
            }
        }
        at_last();
        pool.meet(this_thread);
    }
    // One thread works, and the others wait.
    template <class F> void alone(F work) {
        if (this_thread == 0) work();
        pool.meet(this_thread);
    }

    const Model& m;
    const Pass& p;
    Buffers<T>& b;
    Pool& pool;
    const RowList list;
    const std::vector<Row>& rows = list.rows;
    const std::vector<int>& speaking = list.speaking;

  private:
    std::vector<std::atomic<int64_t>> counters;  // by phase and thread: pieces taken from the front, and from the BACK
};
