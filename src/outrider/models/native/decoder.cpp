// What Python calls: passes, scans of recurrent layers, drafts of chains and trees in one call, packing, random numbers.
#include "heads.hpp"
#include "scan_delta.hpp"
#include "scan_mamba.hpp"
#include "tree.hpp"

extern "C" struct Chain {
    int32_t longest;
    int32_t* depths;              // [batch] guesses wanted; those made
    const Shaping* shaping;
    const int64_t *seeds, *positions;  // [batch] whose noise, and the output position of the first guess
    int64_t* guesses;             // [batch][longest]
    const float* trust;           // [batch] or null: what beliefs are multiplied with
    float* beliefs;               // [batch][longest] where there is trust
    const float* levels;          // [longest]: all rows end before a guess when the sum of their products of trust x belief is
    const float* places;          // below its level plus its place for each; a row does when its product with it is below its place
    const int64_t* ids;           // the target's token for each of the model's, or null where they are the same
};

static void run(const Model& model, const Pass& pass) {
    static auto* narrow = new Buffers<bf16>;
    static auto* wide = new Buffers<float>;
    if (model.is_bf16) Runner<bf16>(model, pass, *narrow).run();
    else Runner<float>(model, pass, *wide).run();
}

// One pass over nodes start .. nodes - 1 of trees kept in arrays of `most` nodes a row.
static void feed(const Model& model, Pass& pass, const std::vector<int64_t>& tokens, const std::vector<int64_t>& parents, int most) {
    std::vector<int64_t> fed, above;
    for (int b = 0; b < pass.batch; b++) {
        fed.insert(fed.end(), tokens.begin() + size_t(b) * most, tokens.begin() + size_t(b) * most + pass.nodes);
        above.insert(above.end(), parents.begin() + size_t(b) * most, parents.begin() + size_t(b) * most + pass.nodes);
    }
    pass.tokens = fed.data(), pass.parents = above.data();
    run(model, pass);
}

// States of the nodes of trees, the root's first, for models that continue them.
class States {
  public:
    States(const Model& model, const Pass& pass, int most) : is_used(model.continues_states()), size(model.hidden), most(most) {
        if (!is_used) return;
        all.resize(size_t(pass.batch) * most * size);
        for (int b = 0; b < pass.batch; b++)
            put(b, 0, pass.hidden + (size_t(b) * pass.nodes + std::max(0, pass.sizes[b] - 1)) * size);
    }
    // Gives each of the pass's nodes the state of its parent
    void enter(Pass& pass, const int64_t* parents, int stride) {
        if (!is_used) return;
        const int count = pass.nodes - pass.start;
        level.assign(size_t(pass.batch) * count * size, 0.0f), pass.hidden = level.data();
        for (int b = 0; b < pass.batch; b++)
            for (int n = pass.start; n < pass.sizes[b]; n++)
                memcpy(at_level(b, n - pass.start, count), at(b, int(parents[size_t(b) * stride + n]) + 1), size_t(size) * 4);
    }
    void keep(const Pass& pass) {
        if (!is_used) return;
        const int count = pass.nodes - pass.start;
        for (int b = 0; b < pass.batch; b++)
            for (int n = pass.start; n < pass.sizes[b]; n++) put(b, n + 1, at_level(b, n - pass.start, count));
    }

  private:
    float* at(int batch, int number) { return all.data() + (size_t(batch) * most + number) * size; }
    float* at_level(int batch, int place, int count) { return level.data() + (size_t(batch) * count + place) * size; }
    void put(int batch, int number, const float* state) { memcpy(at(batch, number), state, size_t(size) * 4); }
    const bool is_used;
    const int size, most;
    std::vector<float> all, level;
};

extern "C" {
// Asks the system for the tile registers; 0 if this machine or system has none and the code needs them.
int outrider_init() { return has_permission(); }
const char* outrider_isa() { return ISA_NAME; }
void outrider_large_pages(void* from, size_t size) { on_large_pages(from, size); }
void outrider_pack(void* to, const void* from, int out, int in, int num_bytes) {  // of one number: 4, 2 or 1
    if (num_bytes == 4) pack(static_cast<float*>(to), static_cast<const float*>(from), out, in);
    else if (num_bytes == 2) pack(static_cast<bf16*>(to), static_cast<const bf16*>(from), out, in);
    else pack(static_cast<int8_t*>(to), static_cast<const int8_t*>(from), out, in);
}
// Whether each of these floats is a bfloat16 too, so that a matrix of them may be packed in 16 bits
int outrider_are_brain(const float* from, size_t count) {
    constexpr size_t STEP = 4096;
    for (size_t begin = 0; begin < count; begin += STEP) {
        uint32_t low = 0;
        for (size_t i = begin; i < std::min(begin + STEP, count); i++) low |= std::bit_cast<uint32_t>(from[i]);
        if (low & 0xffff) return 0;
    }
    return 1;
}
// Rows of a file, numbers of 16 bits. Returns what the matrix is (blocks.hpp): where it may round, products of IEEE's are added in 16 bits
int outrider_pack_rows(void* to, const char* file, const FileRow* rows, int out, int in, int may_round) {
    const auto from_file = [&]<class W>(W* begin) {
        pack_by_row(begin, [=](int j) { return rows[j].type ? reinterpret_cast<const W*>(file + rows[j].at) : nullptr; }, out, in);
    };
    if (rows[0].type != HALF) return from_file(static_cast<bf16*>(to)), IN_BRAIN;
    half* begin = static_cast<half*>(to);
    from_file(begin);
    return may_round && adds_halves(begin, size_t(up(out, BLOCK)) * up(in, 32)) ? IN_HALF_SUMS : IN_HALF;
}
// Rows of a GGUF file: the bytes that sixteen of them take packed; packing them, which writes [blocks] of Place
size_t outrider_packed_size(int64_t type, int in) { return packed_size(type, in); }
void outrider_pack_stored(Place* places, void* to, const void* file, const FileRow* rows, int out, int in, int num_threads) {
    pack_rows(places, static_cast<char*>(to), static_cast<const uint8_t*>(file), rows, out, in, num_threads);
}
void outrider_embed(const Model* model, const int64_t* tokens, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) put_embedding<float>(*model, tokens[i], to + i * model->hidden);
}
void outrider_gumbel(const int64_t* keys, int64_t count, int size, float* out) {
    for (int64_t i = 0; i < count; i++) gumbel_stream(uint64_t(keys[i]), size, out + i * size);
}
int outrider_choose(const Choices* choices) { return Chooser(*choices).run(); }  // how many were not decided; walks along them
void outrider_pass(const Model* model, const Pass* pass) {
    std::lock_guard<std::mutex> only(Pool::lock());
    run(*model, *pass);
}
// Reads the tokens of `pass`, then guesses on by itself, feeding each guess but the last.
void outrider_chain(const Model* model, const Pass* pass, const Chain* chain) {
    std::lock_guard<std::mutex> only(Pool::lock());
    Pass now = *pass;
    std::vector<float> logits(size_t(now.batch) * model->vocab);
    std::vector<int32_t> lengths(now.lengths, now.lengths + now.batch), sizes(now.sizes, now.sizes + now.batch);
    std::vector<int64_t> fed(now.batch);
    std::vector<float> reach(now.batch, 1.0f);
    Shaper shaper(*chain->shaping);
    std::vector<float> spread;
    const int said = chain->ids ? chain->shaping->vocab : model->vocab;
    now.last_only = 1, now.logits = logits.data(), now.lengths = lengths.data(), now.sizes = sizes.data();
    for (int step = 0; step < chain->longest; step++) {
        const int next = std::min(step + 1, chain->longest - 1);
        float hope = 0.0f, price = chain->trust ? chain->levels[next] : 0.0f;
        run(*model, now);
        for (int b = 0; b < now.batch; b++) {
            lengths[b] += sizes[b];
            if (step >= chain->depths[b]) { sizes[b] = 0; continue; }
            const uint64_t key = noise_key(chain->seeds[b], chain->positions[b] + step);
            const int64_t* so_far = chain->guesses + size_t(b) * chain->longest;
            const float temperature = shaper.temperature(b);
            const float* own = logits.data() + size_t(b) * model->vocab;
            const float* law = shaper.law(b, over_target(own, model->vocab, chain->ids, said, spread), said, {step, so_far, nullptr});
            fed[b] = temperature == 0 ? first_best(law, said) : choice(law, said, key);
            chain->guesses[size_t(b) * chain->longest + step] = fed[b];
            if (chain->trust) {
                const float belief = belief_in(fed[b], law, said, temperature, key);
                chain->beliefs[size_t(b) * chain->longest + step] = belief;
                reach[b] *= std::min(1.0f, chain->trust[b] * belief);
                if (reach[b] < chain->places[step]) chain->depths[b] = step;
            }
            sizes[b] = step + 1 < chain->depths[b];
            if (sizes[b] && chain->trust) hope += reach[b], price += chain->places[next];
        }
        const bool is_over = chain->trust && hope < price;
        for (int b = 0; b < now.batch; b++) if (is_over && sizes[b]) sizes[b] = 0, chain->depths[b] = step + 1;
        if (std::all_of(sizes.begin(), sizes.end(), [](int32_t size) { return size == 0; })) break;
        now.nodes = 1, now.tokens = fed.data();
    }
}
// What the nodes of trees read in one recurrent layer; their steps go to the log.
void outrider_mamba_scan(const Scan* scan) {
    std::lock_guard<std::mutex> only(Pool::lock());
    MambaScan(*scan).run();
}
void outrider_delta_scan(const Scan* scan) {
    std::lock_guard<std::mutex> only(Pool::lock());
    DeltaScan(*scan).run();
}
// Reads the tokens of `pass`, then grows a tree behind them, level by level; what is fed after the root stays uncommitted. A model
// that continues states is given those of a node's parent with it.
void outrider_tree(const Model* model, const Pass* pass, const Tree* tree) {
    std::lock_guard<std::mutex> only(Pool::lock());
    Pass now = *pass;
    const int batch = now.batch, most = tree->longest * tree->width;  // nodes fed after the root
    std::vector<float> logits(size_t(batch) * std::max(1, tree->width) * model->vocab);
    std::vector<int32_t> lengths(now.lengths, now.lengths + batch), sizes(now.sizes, now.sizes + batch);
    std::vector<int64_t> tokens(size_t(batch) * most), parents(size_t(batch) * most);
    std::vector<RowGrowth> rows;
    for (int b = 0; b < batch; b++) rows.emplace_back(*tree, b);
    now.last_only = 1, now.logits = logits.data(), now.lengths = lengths.data(), now.sizes = sizes.data();
    run(*model, now);
    States states(*model, now, most + 1);
    for (int b = 0; b < batch; b++) lengths[b] += sizes[b], sizes[b] = 0;
    now.last_only = 0;
    for (int depth = 0, fed = 0; depth < tree->longest; depth++) {
        const int stride = now.nodes - now.start;  // logits of a row
        int level = 0;
        for (int b = 0; b < batch; b++) {
            if (!rows[b].goes_on(depth)) { sizes[b] = 0; continue; }
            const size_t begin = rows[b].pool.size();
            rows[b].add(logits.data() + size_t(b) * (depth ? stride : 1) * model->vocab, model->vocab, model->vocab, depth);
            if (!rows[b].goes_on(depth + 1)) { sizes[b] = 0; continue; }
            int numbered = fed;
            rows[b].choose(begin, numbered);
            for (int place : rows[b].frontier) {
                const Candidate& one = rows[b].pool[place];
                tokens[size_t(b) * most + one.number - 1] = one.token;
                parents[size_t(b) * most + one.number - 1] = rows[b].pool[one.parent].number - 1;
            }
            sizes[b] = numbered, level = std::max(level, numbered - fed);
        }
        if (level == 0) break;
        now.start = fed, now.nodes = fed + level, fed += level;
        states.enter(now, parents.data(), most);
        feed(*model, now, tokens, parents, most);
        states.keep(now);
    }
    for (auto& row : rows) row.write();
}
// Trees of heads without attention, from the target's newest states
void outrider_heads(const Heads* heads, const HeadCall* call, const Tree* tree) {
    std::lock_guard<std::mutex> only(Pool::lock());
    if (heads->is_bf16) grow_from_heads<bf16>(*heads, *call, *tree);
    else grow_from_heads<float>(*heads, *call, *tree);
}
}
