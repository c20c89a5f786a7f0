// Rows that go into a product in short numbers, 32 inputs at a time with a scale of their own: a span.
#pragma once
#include "blocks.hpp"

constexpr int SPAN = 32;  // inputs that share a scale

// [panels][spans][P], so that one pointer leads through all rows that are multiplied together
template <class S, int P> struct Spans {
    const S* spans;
    int num_spans;
    Spans from(int row) const { return {spans + size_t(row / P) * P * num_spans + row % P, num_spans}; }
    const S* at(int k) const { return spans + size_t(k) * P; }  // of the first row
};
// round_spans(floats, number of spans, first span, from a span to the next) fills spans
template <class S, int P> class SpanRows {
  public:
    void reshape(int rows, int width) { num_spans = up(width, SPAN) / SPAN, spans.grow(size_t(up(rows, P)) * num_spans); }
    Spans<S, P> group(int first) const { return Spans<S, P>{spans.data(), num_spans}.from(first); }
    // What lies behind `width` inputs up to a multiple of 32 is zero
    void round(int row, const float* x, int width) {
        round_spans(x, up(width, SPAN) / SPAN, &span(row, 0), P);
    }
    S& span(int row, int k) const { return spans.data()[(size_t(row / P) * num_spans + k) * P + row % P]; }

  private:
    Memory<S> spans;
    int num_spans = 0;
};
static inline float largest_of_span(const float* x) {
    const V low = load(x), high = load(x + LANES);
    return largest(max(max(low, -low), max(high, -high)));
}
