// What a native library computes between passes, and in layers of experts and latents: between_check LIBRARY
//
// A line for every case: its name, then numbers of random models. Whole numbers (choices, trees) are the same on every processor, others
// (logits) about the same. between_check.py compares two libraries, one of them in an emulator.
#define OUTRIDER_ISA_GENERIC
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <deque>
#include <string>

#include "heads.hpp"

constexpr int HIDDEN = 64, QUERIES = 4, DIM = 32, MLP = 96, VOCAB = 80, NODES = 6, PLACES = 64, BATCH = 2, CAPACITY = 8;

static uint32_t state = 1;
static uint32_t next_number() { return (state = state * 1664525u + 1013904223u) >> 8; }
static float chance() { return float(next_number()) / 8388608.0f - 1.0f; }  // in [-1, 1)

static void* library;
template <class F> static F* get(const char* name) { return reinterpret_cast<F*>(dlsym(library, name)); }

template <class N> static void say(const std::string& name, const char* form, const N* numbers, int count) {
    std::printf("%s", name.c_str());
    for (int i = 0; i < count; i++) std::printf(form, numbers[i]);
    std::puts("");
}

// Random numbers that stay as long as the program
static float* floats(int count, float by = 0.0f, float scale = 0.3f) {
    static std::deque<std::vector<float>> kept;
    kept.emplace_back(count);
    for (float& one : kept.back()) one = by + scale * chance();
    return kept.back().data();
}
static bf16* shortened(const float* from, int count) {
    static std::deque<std::vector<bf16>> kept;
    kept.emplace_back();
    for (int i = 0; i < count; i++) kept.back().push_back(to_bf16(from[i]));
    return kept.back().data();
}
static Matrix matrix(int out, int in, bool is_short = false, const float* bias = nullptr) {
    static std::deque<Memory<char>> kept;
    const float* weights = floats(out * in, 0.0f, 1.7f / std::sqrt(float(in)));
    void* packed = kept.emplace_back().grow(size_t(up(out, BLOCK)) * up(in, 32) * 4 + 64);
    const void* from = is_short ? static_cast<const void*>(shortened(weights, out * in)) : weights;
    get<void(void*, const void*, int, int, int)>("outrider_pack")(packed, from, out, in, is_short ? 2 : 4);
    return {packed, bias, nullptr, in, out, 0};
}

// What laws are shaped with: greedy, or all of the sampler
struct Shapes {
    float heat[BATCH] = {0.0f, 0.0f}, penalties[3 * BATCH] = {1.2f, 0.3f, 0.1f, 1.1f, 0.0f, 0.2f};
    Cut cuts[BATCH] = {};
    std::vector<float> in_output = std::vector<float>(BATCH * VOCAB);
    std::vector<uint8_t> in_prompt = std::vector<uint8_t>(BATCH * VOCAB);
    Shaping shaping{};
    explicit Shapes(bool is_greedy) {
        shaping.vocab = VOCAB, shaping.temperatures = heat;
        if (is_greedy) return;
        heat[0] = 0.7f, heat[1] = 1.1f;
        cuts[0].top_p = 0.8, cuts[0].typical_p = 1, cuts[1].top_p = 1, cuts[1].typical_p = 0.7, cuts[1].top_k = 20;
        for (int i = 0; i < BATCH * VOCAB; i += 7) in_output[i] = 1, in_prompt[i + 1] = 1;
        shaping.cuts = cuts, shaping.bias = floats(BATCH * VOCAB), shaping.penalties = penalties;
        shaping.in_output = in_output.data(), shaping.in_prompt = in_prompt.data();
    }
};
static const int64_t SEEDS[BATCH] = {11, 12}, POSITIONS[BATCH] = {0, 5};

static void say_choices(bool is_greedy) {
    Shapes shapes(is_greedy);
    int64_t tokens[BATCH * NODES], parents[BATCH * NODES], out[BATCH * NODES];
    for (int i = 0; i < BATCH * NODES; i++) tokens[i] = (5 * i + 2) % VOCAB, parents[i] = (i % NODES - 1) / 2;
    for (int row = 0; row < BATCH; row++) parents[row * NODES] = -1;
    Choices choices{BATCH, NODES, 0, VOCAB, floats(BATCH * NODES * VOCAB, 0.0f, 4.0f), tokens, parents, &shapes.shaping, SEEDS, POSITIONS, nullptr, out};
    int32_t sizes[BATCH];
    int64_t walks[BATCH * (WALK_HEAD + NODES)] = {};
    std::fill(sizes, sizes + BATCH, NODES), choices.sizes = sizes, choices.walks = walks;
    get<int(const Choices*)>("outrider_choose")(&choices);
    const std::string name = is_greedy ? "greedy" : "sampled";
    say("choices " + name, " %lld", reinterpret_cast<long long*>(out), BATCH * NODES);
    say("walks " + name, " %lld", reinterpret_cast<long long*>(walks), BATCH * (WALK_HEAD + NODES));
}

// Trees that a call has grown
struct Grown {
    int32_t depths[BATCH] = {4, 3}, sizes[BATCH] = {7, 5}, counts[BATCH] = {};
    int64_t tokens[BATCH * CAPACITY] = {}, parents[BATCH * CAPACITY] = {}, numbers[BATCH * CAPACITY] = {};
    Shapes shapes;
    Tree tree;
    explicit Grown(bool is_greedy, bool in_beams = false) : shapes(is_greedy), tree{4, 3, 4, CAPACITY, 0.9f, depths, sizes, &shapes.shaping, SEEDS, POSITIONS, tokens, parents, numbers, counts, nullptr, in_beams} {}
    void say_it(const std::string& name) {
        say(name + " tokens", " %lld", reinterpret_cast<long long*>(tokens), BATCH * CAPACITY);
        say(name + " parents", " %lld", reinterpret_cast<long long*>(parents), BATCH * CAPACITY);
    }
};

static void say_heads(const std::string& name, Heads heads, const std::function<HeadLevel(int)>& level_of, bool is_greedy) {
    const int64_t roots[BATCH] = {3, 4};
    std::vector<HeadLevel> levels;
    for (int depth = 0; depth < heads.num_levels; depth++) levels.push_back(level_of(depth));
    heads.level = levels.data(), heads.hidden = HIDDEN, heads.vocab = VOCAB, heads.eps = heads.norm_eps = 1e-5f, heads.state_norm = floats(HIDDEN, 1.0f);
    const HeadCall call{BATCH, 2, 1, floats(BATCH * 2 * HIDDEN, 0.0f, 1.0f), roots};
    Grown grown(is_greedy, heads.joins);
    get<void(const Heads*, const HeadCall*, const Tree*)>("outrider_heads")(&heads, &call, &grown.tree);
    grown.say_it(name + (heads.is_bf16 ? " bf16" : " float32") + (is_greedy ? " greedy" : " sampled"));
}
static void say_all_heads(bool is_short, bool is_greedy) {
    const float* rows = floats(VOCAB * HIDDEN, 0.0f, 1.0f);
    const void* embedding = is_short ? static_cast<const void*>(shortened(rows, VOCAB * HIDDEN)) : rows;
    Matrix* block = new Matrix(matrix(HIDDEN, HIDDEN, is_short, floats(HIDDEN)));
    Heads independent{}, tokens{}, summed{}, joined{};
    independent.num_levels = tokens.num_levels = summed.num_levels = 4, joined.num_levels = 1;
    independent.keeps_state = tokens.keeps_state = joined.keeps_state = 1;
    for (Heads* heads : {&independent, &tokens, &summed, &joined}) heads->is_bf16 = is_short, heads->embedded = HIDDEN;
    tokens.moving = TOKENS, summed.moving = joined.moving = CELL;
    summed.from_state = summed.is_gelu = summed.halves = 1, summed.share = 0.4f, joined.joins = 1;
    const auto readout = [=](HeadLevel level, int in) { return level.readout = matrix(VOCAB, in, is_short), level; };
    say_heads("medusa", independent, [&](int depth) {
        HeadLevel level{};
        level.blocks = block, level.num_blocks = 1, level.place = depth % 2;
        return readout(level, HIDDEN);
    }, is_greedy);
    say_heads("hydra", tokens, [&](int depth) {
        HeadLevel level{};
        level.embedding = embedding, level.blocks = block, level.num_blocks = 1, level.place = 1;
        level.enter = matrix(HIDDEN, (depth + 2) * HIDDEN, is_short), level.bent = matrix(HIDDEN, (depth + 2) * HIDDEN, is_short, floats(HIDDEN));
        return readout(level, HIDDEN);
    }, is_greedy);
    say_heads("mlp-speculator", summed, [&](int) {
        HeadLevel level{};
        level.embedding = embedding, level.place = 1, level.cell = matrix(HIDDEN, HIDDEN, is_short);
        level.norm = floats(HIDDEN, 1.0f), level.shift = floats(HIDDEN);
        return readout(level, HIDDEN);
    }, is_greedy);
    say_heads("redrafter", joined, [&](int) {
        HeadLevel level{};
        level.embedding = embedding, level.place = 1, level.cell = matrix(HIDDEN, 2 * HIDDEN, is_short, floats(HIDDEN));
        level.enter = matrix(HIDDEN, 2 * HIDDEN, is_short, floats(HIDDEN)), level.blocks = block, level.num_blocks = 1;
        return readout(level, HIDDEN);
    }, is_greedy);
}

enum Layer { EAGLE, EXPERTS, LATENTS };
class OneLayer {
  public:
    OneLayer(Layer of, bool is_short) : kind(of), is_bf16(is_short) {
        const int dim = kind == LATENTS ? RANK + ROTATED : DIM, keys = kind == LATENTS ? 1 : 2, seen = QUERIES * (kind == LATENTS ? DIM : dim);
        const int outputs = kind == LATENTS ? QUERIES * (DIM + ROTATED) + dim : (QUERIES + 2 * keys) * dim;
        layer.qkv = matrix(outputs, kind == EAGLE ? 2 * HIDDEN : HIDDEN, is_bf16), layer.out = matrix(HIDDEN, seen, is_bf16);
        layer.gate_up = matrix(2 * MLP, HIDDEN, is_bf16), layer.down = matrix(HIDDEN, MLP, is_bf16);
        layer.attention_norm = floats(HIDDEN, 1.0f), layer.mlp_norm = floats(HIDDEN, 1.0f);
        if (kind == EAGLE) layer.beside_norm = floats(HIDDEN, 1.0f);
        if (kind == EXPERTS) add_experts();
        if (kind == LATENTS) add_latent();
        const float* rows = floats(VOCAB * HIDDEN, 0.0f, 1.0f);
        model.is_bf16 = is_bf16, model.hidden = HIDDEN, model.layers = 1, model.heads = QUERIES, model.kv_heads = keys, model.head_dim = dim;
        model.mlp = MLP, model.vocab = VOCAB, model.gated = 1, model.norm_eps = 1e-5f, model.query_scale = 1.0f / std::sqrt(float(DIM));
        model.embedding_scale = model.residual_scale = model.logit_scale = 1.0f;
        model.embedding = is_bf16 ? static_cast<const void*>(shortened(rows, VOCAB * HIDDEN)) : rows;
        model.norm = floats(HIDDEN, 1.0f), model.head = matrix(VOCAB, HIDDEN, is_bf16), model.layer = &layer;
        const int turned = kind == LATENTS ? ROTATED : dim;
        for (int i = 0; i < PLACES * turned; i++) {
            const double angle = i / turned * std::pow(10000.0, -2.0 * (i % (turned / 2)) / turned);
            cosines.push_back(float(std::cos(angle))), sines.push_back(float(std::sin(angle)) * (i % turned < turned / 2 ? -1.0f : 1.0f));
        }
        cache.resize(size_t(BATCH) * 2 * keys * PLACES * dim);
    }
    void say_logits(const std::string& name) {
        Pass pass = chains();
        std::vector<float> logits(size_t(BATCH) * NODES * VOCAB);
        pass.logits = logits.data();
        get<void(const Model*, const Pass*)>("outrider_pass")(&model, &pass);
        say(name + (is_bf16 ? " bf16" : " float32"), " %.5f", logits.data(), int(logits.size()));
    }
    void say_tree(bool is_greedy) {
        Pass pass = chains();
        Grown grown(is_greedy);
        pass.hidden = floats(BATCH * NODES * HIDDEN, 0.0f, 1.0f);
        get<void(const Model*, const Pass*, const Tree*)>("outrider_tree")(&model, &pass, &grown.tree);
        grown.say_it(std::string("eagle") + (is_bf16 ? " bf16" : " float32") + (is_greedy ? " greedy" : " sampled"));
    }

  private:
    static constexpr int RANK = 32, ROTATED = 32, EXPERT_COUNT = 4;
    void add_experts() {
        experts.router = matrix(EXPERT_COUNT, HIDDEN, is_bf16);
        for (int i = 0; i < EXPERT_COUNT; i++) first.push_back(matrix(2 * MLP, HIDDEN, is_bf16)), second.push_back(matrix(HIDDEN, MLP, is_bf16));
        experts.gate_up = first.data(), experts.down = second.data();
        experts.count = EXPERT_COUNT, experts.chosen = 2, experts.normalised = 1, experts.scale = 1.0f, layer.experts = &experts;
    }
    void add_latent() {
        for (int i = 0; i < QUERIES; i++) first.push_back(matrix(RANK, DIM, is_bf16)), second.push_back(matrix(DIM, RANK, is_bf16));
        latent.key_up = first.data(), latent.value_up = second.data(), latent.norm = floats(RANK, 1.0f), latent.norm_eps = 1e-5f;
        latent.rank = RANK, latent.nope_dim = DIM, latent.rope_dim = ROTATED, latent.value_dim = DIM, layer.latent = &latent;
    }
    Pass chains() {
        Pass pass{};
        for (int i = 0; i < BATCH * NODES; i++) tokens[i] = (7 * i + 3) % VOCAB;
        cosine = cosines.data(), sine = sines.data();
        pass.batch = BATCH, pass.nodes = NODES, pass.last_layer = 1, pass.page_len = PLACES, pass.num_threads = 1;
        pass.num_pages = BATCH, pass.pages = pages, pass.columns = 1, pass.tokens = tokens, pass.sizes = sizes, pass.lengths = lengths;
        pass.cache = cache.data(), pass.cosines = &cosine, pass.sines = &sine;
        return pass;
    }
    const Layer kind;
    const bool is_bf16;
    LayerWeights layer{};
    Experts experts{};
    Latent latent{};
    Model model{};
    std::vector<Matrix> first, second;
    std::vector<float> cosines, sines, cache;
    const float *cosine = nullptr, *sine = nullptr;
    int64_t tokens[BATCH * NODES];
    const int32_t sizes[BATCH] = {NODES, NODES - 2}, lengths[BATCH] = {0, 0}, pages[BATCH] = {0, 1};
};

int main(int, char** given) {
    library = dlopen(given[1], RTLD_NOW);
    if (!library) return std::puts(dlerror()), 1;
    if (!get<int()>("outrider_init")()) return std::puts("this processor lacks what the library needs"), 1;
    for (bool is_greedy : {true, false}) {
        say_choices(is_greedy);
        for (bool is_short : {false, true}) {
            say_all_heads(is_short, is_greedy);
            OneLayer(EAGLE, is_short).say_tree(is_greedy);
        }
    }
    for (bool is_short : {false, true}) OneLayer(EXPERTS, is_short).say_logits("experts"), OneLayer(LATENTS, is_short).say_logits("latents");
    return 0;
}
