// A model, and one pass over the nodes of B trees, as Python describes them (structs.py, field by field).
#pragma once
#include "blocks.hpp"

extern "C" {
struct LayerWeights {
    Matrix qkv, out, gate_up, down;  // gate_up: 16 gates, their 16 ups, and so on
    const float *attention_norm, *mlp_norm, *attention_post_norm, *mlp_post_norm, *q_norm, *k_norm;  // null where absent
    int32_t rope, window;  // -1: no positions; 0: no window
};
struct Model {
    int32_t is_bf16, has_stored, hidden, layers, heads, kv_heads, head_dim, mlp, vocab, activation, embedding_type;
    float norm_eps, query_scale, embedding_scale, attention_cap, final_cap, residual_scale, logit_scale;
    // [vocab][hidden]; rows of a GGUF file where embedding_type is not 0 (stored_types.hpp); null: a pass brings what enters the first layer
    const void* embedding;
    const float* norm;
    Matrix head;
    const LayerWeights* layer;
};
struct Pass {
    int32_t batch, nodes, start, first_layer, last_layer, page_len, num_threads, num_taps;
    const int64_t* tokens;   // [batch][nodes]
    const int64_t* parents;  // [batch][nodes], null for chains
    const int32_t* sizes;    // [batch]
    const int32_t* lengths;  // [batch]
    void* cache;             // [layers][2][num_pages][kv_heads][page_len][head_dim]; a page has a power of two of tokens
    const float* const* cosines;  // per rope: [positions][head_dim]
    const float* const* sines;
    const uint8_t *attention_on, *mlp_on;  // [layers] or null: all
    const int32_t* tap_layers;
    float* taps;             // [num_taps][batch][nodes - start][hidden]
    float* hidden;           // [batch][nodes - start][hidden] or null: in when first_layer > 0 or there is no embedding, out when not null
    float* logits;           // [batch][nodes - start][vocab] or null
    int32_t last_only;       // logits [batch][vocab] of each row's last node only
    int32_t num_pages;
    void (*sum)(float* values, int64_t count);  // over the ranks of a divided model, in place; null where the model is whole
    const int32_t* pages;    // [batch][columns]: slot s of a row lies in its page s / page_len
    int32_t columns;
};
}
