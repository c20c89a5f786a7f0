// Sixteen floats at a time, whatever the instruction set, and the memory they lie in.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <new>
#include <vector>

#include "isa/isa.hpp"

static inline float sum(V v) {  // a fixed tree of additions
    float x[LANES];
    store(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}
static inline float lane(V v, int at) {
    float x[LANES];
    store(x, v);
    return x[at];
}
static inline V tanh(V x) {  // 1 - 2 / (e^2x + 1)
    return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
}

// Asks the system to lay this out on large pages, which spares the address tables.
static inline void on_large_pages([[maybe_unused]] void* from, [[maybe_unused]] size_t size) {
#if defined(__linux__)
    madvise(from, size, MADV_HUGEPAGE);
#endif
}
// Memory that begins with a cache line, or everything that is read from it would come from two at a time. Much of it lies on large
// pages. It only grows.
template <class T> class Memory {
  public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { release(); }
    T* data() const { return begin; }
    T* grow(size_t size) {
        if (size <= room) return begin;
        const bool is_large = size * sizeof(T) >= LARGE;
        release();
        unit = is_large ? LARGE_PAGE : 64;
        const size_t bytes = (size * sizeof(T) + unit - 1) / unit * unit;
        begin = static_cast<T*>(::operator new(bytes, std::align_val_t(unit)));
        if (is_large) on_large_pages(begin, bytes);
        memset(begin, 0, bytes);
        room = bytes / sizeof(T);
        return begin;
    }

  private:
    static constexpr size_t LARGE = 1 << 20, LARGE_PAGE = 1 << 21;
    void release() {
        if (begin) ::operator delete(static_cast<void*>(begin), std::align_val_t(unit));
        begin = nullptr, room = 0;
    }
    T* begin = nullptr;
    size_t room = 0, unit = 64;
};
