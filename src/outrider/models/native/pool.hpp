// A few threads that go through the phases of a pass together. Work inside a phase is handed out piece by piece, so a
// thread that the system holds up does not hold up the others by more than one piece. On a busy machine even that can be most
// of the time; then the caller works alone for a while. Results do not depend on who computes what.
#pragma once
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <atomic>
#include <chrono>
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

// A forked child has no threads: it makes new ones. Windows does not fork.
static inline void forget_in_children([[maybe_unused]] void (*forget)()) {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, forget);
#endif
}

class Pool {
  public:
    static Pool& of(int num_threads) {
        static Pool* pool = nullptr;
        static bool watched = false;
        if (!watched) {
            watched = true;
            forget_in_children([] { pool = nullptr; });
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
    // Threads that work on this pass: all, or the caller alone.
    int active() const { return active_; }

    // Runs work(thread) on every thread of the pool, the caller being number 0, or on the caller alone.
    void run(const std::function<void(int)>& work) {
        const bool alone = size_ == 1 || alone_ > 0;
        active_ = alone ? 1 : size_;
        if (alone_ > 0) alone_--;
        if (alone) return work(0);
        const auto began = Clock::now();
        waited_ = Clock::duration::zero();
        work_ = &work;
        running_.store(size_ - 1);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        work(0);
        for (int spins = 0; running_.load() > 0; spins++) rest(spins);
        const auto lasted = Clock::now() - began;
        crowded_ = waited_ * 5 > lasted * 3 ? crowded_ + 1 : 0;  // more than 60 % of the time was waiting
        if (crowded_ >= 2) alone_ = 64, crowded_ = 0;
    }
    // Nobody goes on before everybody came.
    void meet(int thread) {
        if (active_ == 1) return;
        const int round = round_.load();
        if (arrived_.fetch_add(1) == size_ - 1) {
            arrived_.store(0);
            round_.store(round + 1);
            return;
        }
        const auto began = thread == 0 ? Clock::now() : Clock::time_point();
        for (int spins = 0; round_.load() == round; spins++) rest(spins);
        if (thread == 0) waited_ += Clock::now() - began;
    }

  private:
    using Clock = std::chrono::steady_clock;

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
        else std::this_thread::yield();
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
    Clock::duration waited_{};  // by the caller, in this pass
    int active_ = 1, alone_ = 0, crowded_ = 0;
    std::atomic<int> epoch_{0}, running_{0}, arrived_{0}, round_{0};
};
