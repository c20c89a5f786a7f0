// A model, and one pass over the nodes of B trees, as Python describes them (structs.py, field by field).
#pragma once
#include "blocks.hpp"

// What shares a norm of queries or keys: heads have one weight, or each its own, or all are one vector.
enum QuerySpan { ONE_HEAD, EACH_HEAD, ALL_HEADS };

extern "C" {
struct Experts {
    Matrix router;
    const float* correction;             // [count] added for the choice alone, or null
    const Matrix *gate_up, *down;        // [count]
    Matrix shared_gate_up, shared_down;  // of an MLP beside the experts; without inputs where there is none
    int32_t count, chosen, groups, chosen_groups, group_best, by_sigmoid, normalised;
    float scale;
};
struct Latent {
    Matrix query_up;                  // without inputs where queries are made of the residual stream
    const Matrix *key_up, *value_up;  // [heads]
    const float *norm, *query_norm;
    int32_t rank, nope_dim, rope_dim, value_dim;
    float norm_eps;
};
struct LayerWeights {
    Matrix qkv, out, gate_up, down;  // gate_up: 16 gates, their 16 ups, and so on; without a gate the ups
    const float *attention_norm, *mlp_norm, *attention_post_norm, *mlp_post_norm, *q_norm, *k_norm;  // null where absent
    const float *attention_norm_bias, *mlp_norm_bias;
    const float* beside_norm;  // of the token's embedding, which qkv reads before the stream (EAGLE-3); or null
    const float* sinks;      // [heads] scores beside those of the keys, without a value, or null
    const Experts* experts;  // in the place of gate_up and down, or null
    const Latent* latent;    // qkv makes queries or their latent, the latent and the rotated key; or null
    int32_t rope, window;  // -1: no positions; 0: no window
};
struct Model {
    // has_stored: 1 if matrices are quantised, 2 if some are IEEE's 16 bits, 3 if both are there
    int32_t is_bf16, has_stored, hidden, layers, heads, kv_heads, head_dim, mlp, vocab, activation, embedding_type;  // mlp: the widest
    int32_t layer_norms, gated, parallel, query_span;  // parallel: attention and MLP read the same stream; query_span: QuerySpan
    float norm_eps, query_scale, embedding_scale, attention_cap, final_cap, residual_scale, logit_scale;
    // [vocab][hidden]; rows of a GGUF file where embedding_type is not 0 (stored_types.hpp); null: a pass brings what enters the first layer
    const void* embedding;
    const float *norm, *norm_bias;
    Matrix head;
    Matrix entry;  // makes what enters the first layer of a token's embedding and the state before it (EAGLE); without inputs: none
    const LayerWeights* layer;
    bool continues_states() const { return entry.in || (layers && layer[0].beside_norm); }
};
struct Pass {
    int32_t batch, nodes, start, first_layer, last_layer, page_len, num_threads, num_taps;
    const int64_t* tokens;   // [batch][nodes]
    const int64_t* parents;  // [batch][nodes], null for chains
    const int32_t* sizes;    // [batch]
    const int32_t* lengths;  // [batch]
    void* cache;             // [layers][2, or 1 of latents][num_pages][kv_heads][page_len][head_dim]; a page has a power of two of tokens
    const float* const* cosines;  // per rope: [positions][head_dim]
    const float* const* sines;
    const uint8_t *attention_on, *mlp_on;  // [layers] or null: all
    const int32_t* tap_layers;
    float* taps;             // [num_taps][batch][nodes - start][hidden]
    float* hidden;           // [batch][nodes - start][hidden] or null: in when first_layer > 0, without an embedding or where states are continued, out when not null
    float* logits;           // [batch][nodes - start][vocab] or null; [num_spoken][spoken_nodes][vocab] where only the first rows speak
    int32_t last_only;       // logits [batch][vocab] of each row's last node only
    int32_t num_pages;
    void (*sum)(float* values, int64_t count);  // over the ranks of a divided model, in place; null where the model is whole
    const int32_t* pages;    // [batch][columns]: slot s of a row lies in its page s / page_len
    int32_t columns;
    int32_t num_spoken, spoken_nodes;  // rows of the batch whose logits are wanted, the others being prompts that are read; 0: all
};
}
