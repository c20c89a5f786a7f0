// A few threads that go through the phases of a pass together. Work inside a phase is handed out piece by piece, so a
// thread that the system holds up does not hold up the others by more than one piece.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

static inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

class Pool {
  public:
    static Pool& of(int num_threads) {
        static Pool* pool = nullptr;
        static bool watched = false;
        if (!watched) {
            watched = true;
            pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });  // a forked child has no threads: it makes new ones
        }
        if (pool == nullptr || pool->size() != num_threads) {
            delete pool;
            pool = new Pool(num_threads);
        }
        return *pool;
    }
    static std::mutex& lock() {
        static std::mutex* mutex = new std::mutex;
        return *mutex;
    }
    int size() const { return size_; }

    // Runs work(thread) on every thread of the pool, the caller being number 0.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        running_.store(size_ - 1);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        work(0);
        for (int spins = 0; running_.load() > 0; spins++) rest(spins);
    }
    // Nobody goes on before everybody came.
    void meet() {
        if (size_ == 1) return;
        int round = round_.load();
        if (arrived_.fetch_add(1) == size_ - 1) {
            arrived_.store(0);
            round_.store(round + 1);
            return;
        }
        for (int spins = 0; round_.load() == round; spins++) rest(spins);
    }

  private:
    explicit Pool(int num_threads) : size_(num_threads) {
        for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { serve(i); });
    }
    ~Pool() {
        work_ = nullptr;
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    static void rest(int spins) {
        if (spins < 4096) pause_cpu();
        else sched_yield();
    }
    void serve(int index) {
        for (int seen = 0;;) {
            for (int spins = 0; epoch_.load() == seen && spins < 20000; spins++) pause_cpu();
            epoch_.wait(seen);
            seen = epoch_.load();
            if (work_ == nullptr) return;
            (*work_)(index);
            running_.fetch_sub(1);
        }
    }
    const int size_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<int> epoch_{0}, running_{0}, arrived_{0}, round_{0};
};
