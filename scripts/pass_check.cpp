// What the libraries of a wheel do on a processor, real or emulated: pass_check FOLDER MACHINE [LIBRARY ...]
//
// FOLDER holds MACHINE-sets.so and a library for each set. A line for every set that the processor has, the best first, which is the one
// that is chosen: its name, a digest of the logits of a small random model in float32, in bfloat16 with 8 bits and as stored, and whether a node's
// logits are the same bits alone and with others. Libraries that are named after MACHINE are run too, for comparison.
#define OUTRIDER_ISA_GENERIC
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "model.hpp"
#include "stored_types.hpp"

constexpr int HIDDEN = 64, HEADS = 4, KV_HEADS = 2, DIM = 32, MLP = 96, VOCAB = 80, LAYERS = 2, NODES = 16, CAPACITY = 32;

static uint32_t state = 1;
static uint32_t next_number() { return (state = state * 1664525u + 1013904223u) >> 8; }
static float chance() { return float(next_number()) / 8388608.0f - 1.0f; }  // in [-1, 1)

struct Library {
    void* handle;
    template <class F> F* get(const char* name) const { return reinterpret_cast<F*>(dlsym(handle, name)); }
};

enum Kind { FLOATS, EIGHT_BITS, STORED };

class RandomModel {
  public:
    RandomModel(Library from, Kind of) : library(from), kind(of) {
        state = 1;
        for (LayerWeights& layer : layers) {
            layer.qkv = matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), layer.out = matrix(HIDDEN, HEADS * DIM);
            layer.gate_up = matrix(2 * MLP, HIDDEN), layer.down = matrix(HIDDEN, MLP);
            layer.attention_norm = floats(HIDDEN, 1.0f), layer.mlp_norm = floats(HIDDEN, 1.0f);
        }
        const float* rows = floats(VOCAB * HIDDEN);
        for (int i = 0; i < VOCAB * HIDDEN; i++) embedding.push_back(to_bf16(rows[i]));
        model.is_bf16 = kind == EIGHT_BITS, model.has_stored = kind == STORED, model.gated = 1;
        model.hidden = HIDDEN, model.layers = LAYERS, model.heads = HEADS, model.kv_heads = KV_HEADS, model.head_dim = DIM;
        model.mlp = MLP, model.vocab = VOCAB, model.norm_eps = 1e-5f, model.query_scale = 1.0f / std::sqrt(float(DIM));
        model.embedding_scale = model.residual_scale = model.logit_scale = 1.0f;
        model.embedding = kind == EIGHT_BITS ? static_cast<const void*>(embedding.data()) : rows;
        model.norm = floats(HIDDEN, 1.0f), model.head = matrix(VOCAB, HIDDEN), model.layer = layers;
        for (int position = 0; position < CAPACITY; position++)
            for (int d = 0; d < DIM; d++) {
                const double angle = position * std::pow(10000.0, -2.0 * (d % (DIM / 2)) / DIM);
                cosines.push_back(float(std::cos(angle))), sines.push_back(float(std::sin(angle)));
            }
    }
    // The logits of a chain of NODES tokens, `together` at a time
    std::vector<float> logits(int together) {
        std::vector<float> found(size_t(NODES) * VOCAB), cache(size_t(LAYERS) * 2 * KV_HEADS * CAPACITY * DIM);
        int64_t tokens[NODES];
        for (int i = 0; i < NODES; i++) tokens[i] = (7 * i + 3) % VOCAB;
        const float *cosine = cosines.data(), *sine = sines.data();
        for (int32_t done = 0; done < NODES; done += together) {
            const int32_t size = together, page = 0;
            Pass pass{};
            pass.batch = 1, pass.nodes = size, pass.last_layer = LAYERS, pass.page_len = CAPACITY, pass.num_threads = 1;
            pass.num_pages = 1, pass.pages = &page, pass.columns = 1;
            pass.tokens = tokens + done, pass.sizes = &size, pass.lengths = &done, pass.cache = cache.data();
            pass.cosines = &cosine, pass.sines = &sine, pass.logits = found.data() + size_t(done) * VOCAB;
            library.get<void(const Model*, const Pass*)>("outrider_pass")(&model, &pass);
        }
        return found;
    }

  private:
    float* floats(int count, float by = 0.0f) {
        kept.emplace_back(count);
        for (float& one : kept.back()) one = by + 0.3f * chance();
        return kept.back().data();
    }
    void* room(size_t bytes) {
        memories.emplace_back(new Memory<char>);
        return memories.back()->grow(bytes + 64);
    }
    Matrix matrix(int out, int in) {
        if (kind == STORED) return stored_matrix(out, in);
        const size_t size = size_t(up(out, BLOCK)) * up(in, 32);
        const float* weights = floats(out * in);
        auto* pack_into = library.get<void(void*, const void*, int, int, int)>("outrider_pack");
        void* packed = room(size * 4);
        if (kind == FLOATS) return pack_into(packed, weights, out, in, 4), Matrix{packed, nullptr, nullptr, in, out, 0};
        std::vector<int8_t> rounded(size_t(out) * in);
        for (size_t i = 0; i < rounded.size(); i++) rounded[i] = int8_t(std::lround(weights[i] * 400));
        pack_into(packed, rounded.data(), out, in, 1);
        float* scales = floats(out, 1.0f);
        for (int j = 0; j < out; j++) scales[j] /= 400;
        return {packed, nullptr, scales, in, out, 0};
    }
    Matrix stored_matrix(int out, int in) {  // of Q4_0 and Q8_0 in turns, sixteen outputs at a time; scales of 2^-6 and 2^-10
        uint8_t* file = static_cast<uint8_t*>(room(size_t(out) * in / SPAN * Q8_0::FILE_BYTES));
        std::vector<FileRow> rows;
        size_t at = 0, size = 0;
        for (int j = 0; j < out; j++) {
            const bool is_short = j / BLOCK % 2;
            rows.push_back({int64_t(at), is_short ? 2 : 1});
            for (int unit = 0; unit < in / SPAN; unit++) {
                const size_t end = at + (is_short ? Q4_0::FILE_BYTES : Q8_0::FILE_BYTES);
                file[at++] = 0, file[at++] = is_short ? 0x24 : 0x14;
                while (at < end) file[at++] = uint8_t(next_number());
            }
        }
        for (int j = 0; j < out; j += BLOCK) size += library.get<size_t(int64_t, int)>("outrider_packed_size")(rows[j].type, in);
        auto* places = static_cast<Place*>(room(sizeof(Place) * up(out, BLOCK) / BLOCK));
        auto* pack_into = library.get<void(Place*, void*, const void*, const FileRow*, int, int, int)>("outrider_pack_stored");
        pack_into(places, room(size), file, rows.data(), out, in, 1);
        return {places, nullptr, nullptr, in, out, 1};
    }
    Library library;
    Kind kind;
    std::vector<std::vector<float>> kept;
    std::vector<Memory<char>*> memories;  // as long as the program
    LayerWeights layers[LAYERS] = {};
    std::vector<float> cosines, sines;
    std::vector<bf16> embedding;
    Model model{};
};

static bool run(const std::string& path) {
    const Library library{dlopen(path.c_str(), RTLD_NOW)};
    if (!library.handle) return std::puts(dlerror()), false;
    const char* name = library.get<const char*()>("outrider_isa")();
    if (!library.get<int()>("outrider_init")()) return std::printf("%s cannot be initialised\n", name), false;
    uint64_t digest = 14695981039346656037u;
    bool is_same = true;
    for (Kind kind : {FLOATS, EIGHT_BITS, STORED}) {
        RandomModel model(library, kind);
        const std::vector<float> alone = model.logits(1), together = model.logits(NODES);
        is_same = is_same && !memcmp(alone.data(), together.data(), alone.size() * 4);
        for (float one : alone) {
            uint32_t bits;
            memcpy(&bits, &one, 4);
            digest = (digest ^ bits) * 1099511628211u;
            is_same = is_same && std::isfinite(one);
        }
    }
    std::printf("%s %016llx %s\n", name, static_cast<unsigned long long>(digest), is_same ? "same" : "DIFFERENT");
    return is_same;
}

int main(int count, char** given) {
    const std::string prefix = std::string(given[1]) + "/" + given[2] + "-";
    const Library sets{dlopen((prefix + "sets.so").c_str(), RTLD_NOW)};
    if (!sets.handle) return std::puts(dlerror()), 1;
    bool is_right = true;
    const std::string names = sets.get<const char*()>("outrider_sets")();
    for (size_t begin = 0, end; begin < names.size(); begin = end + 1) {
        end = std::min(names.find(' ', begin), names.size());
        is_right = run(prefix + names.substr(begin, end - begin) + ".so") && is_right;
    }
    for (int i = 3; i < count; i++) is_right = run(given[i]) && is_right;
    return is_right ? 0 : 1;
}
