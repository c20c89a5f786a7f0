// What a pass keeps between phases, and from one pass to the next.
#pragma once
#include "experts.hpp"
#include "half_sums.hpp"
#include "in_place.hpp"
#include "latent.hpp"
#include "matmul.hpp"
#include "rows.hpp"
#include "unpacked.hpp"

template <class T> struct Buffers {  // kept between passes
    Memory<float> residual, wide;
    Inputs<T> narrow, gated, last, beside;  // beside: what the MLP of a parallel layer reads
    ExpertLayers<T> experts;
    LatentLayers<T> latents;
    std::vector<float> scales;  // [rows][queries, keys] of norms over all heads
    RoundedRows rounded, rounded_parts;  // what goes into a product with a stored matrix, or with several
    Inputs<T> ordered;                   // what goes into a product whose matrix has its columns in another order
    HalfRows halves, half_parts;         // the same in 16 bits
    std::vector<int> begins;             // of the rows of each of several
    Memory<T> queries;
    std::vector<std::vector<float>> spaces;
};

struct Sums {  // of some rows and a few blocks: what a product found
    float* at;
    int rows, wide;
    float* operator()(int row) const { return at + row * wide; }
};

struct NormWeights {
    const float *weight, *bias;  // no weight: nothing is normalised
};
struct Moments {
    float mean, scale;
};

static inline float value(float x) { return x; }
static inline float value(bf16 x) { return to_float(x); }
// What enters the first layer
template <class T> static void put_embedding(const Model& m, int64_t token, float* to) {
    const T* from = static_cast<const T*>(m.embedding) + size_t(token) * m.hidden;
    if (m.embedding_type >= HALF && m.embedding_type <= PACKED_BRAIN)
        widen_row(m.embedding, token, m.embedding_type, m.hidden, to);
    else if (m.embedding_type)
        with_type(m.embedding_type, [&]<class W>() {
            dequantise<W>(static_cast<const uint8_t*>(m.embedding) + size_t(token) * (m.hidden / W::WIDTH) * W::FILE_BYTES, m.hidden, to);
        });
    else for (int i = 0; i < m.hidden; i++) to[i] = value(from[i]);
    for (int i = 0; i < m.hidden; i++) to[i] *= m.embedding_scale;
}

