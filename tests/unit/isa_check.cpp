// What every instruction set promises, checked against plain loops: compiled and run by test_native_isa.py, natively or emulated.
#include <cmath>
#include <cstdio>
#include <vector>

#include "attention.hpp"
#include "half_sums.hpp"
#include "matmul.hpp"
#include "unpacked.hpp"

static int failures = 0;
static void expect(bool holds, const char* what, int a = 0, int b = 0) {
    if (holds) return;
    failures++;
    printf("%s: %s fails (%d, %d)\n", ISA_NAME, what, a, b);
}
static float chance() {  // in [-1, 1)
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return float(state >> 8) / 8388608.0f - 1.0f;
}
static bool is_near(double found, double wanted, double tolerance) { return std::fabs(found - wanted) <= tolerance * (1 + std::fabs(wanted)); }

static void check_lanes() {
    float x[LANES], y[LANES];
    bf16 h[LANES];
    for (int i = 0; i < LANES; i++) x[i] = 3.0f * chance();
    store(y, load(x));
    for (int i = 0; i < LANES; i++) expect(y[i] == x[i], "load and store", i);
    store(h, load(x));
    store(y, rounded(load(x)));
    for (int i = 0; i < LANES; i++) expect(h[i] == to_bf16(x[i]) && y[i] == to_float(h[i]), "rounding to bfloat16", i);
    store(y, load(h));
    for (int i = 0; i < LANES; i++) expect(y[i] == to_float(h[i]), "loading bfloat16", i);
    store(y, exp(load(x)));
    for (int i = 0; i < LANES; i++) expect(is_near(y[i], std::exp(double(x[i])), 3e-7), "exp", i);
    store(y, exp(splat(-90.0f)));
    expect(y[0] == 0, "exp of what is too small");
    float query[2 * LANES], many[LANES][2 * LANES];
    const float* keys[LANES];
    double wanted[LANES] = {};
    for (float& one : query) one = chance();
    for (int i = 0; i < LANES; i++) {
        keys[i] = many[i];
        for (int j = 0; j < 2 * LANES; j++) wanted[i] += query[j] * (many[i][j] = chance());
    }
    const float* queries[QUERIES_AT_ONCE];
    V found[QUERIES_AT_ONCE], one;
    std::fill(queries, queries + QUERIES_AT_ONCE, query);
    dots<QUERIES_AT_ONCE>(queries, keys, 2 * LANES, found), dots<1>(queries, keys, 2 * LANES, &one);
    store(y, one);
    for (int i = 0; i < LANES; i++) expect(is_near(y[i], wanted[i], 1e-5), "a query times a key", i);
    for (const V& some : found) {
        float other[LANES];
        store(other, some);
        expect(!memcmp(y, other, sizeof y), "a query's own bits");
    }
    double total = 0;
    for (int i = 0; i < LANES; i++) total += query[i];
    expect(is_near(sum(load(query)), total, 1e-5), "sum");
}

static float value(float x) { return x; }
static float value(bf16 x) { return to_float(x); }
static float value(int8_t x) { return x; }
static float value(half x) { return half_to_float(x.bits); }
static float value(BrainDots x) { return to_float(x.number); }
static void make(BrainDots& x) { x.number = to_bf16(chance()); }
static void make(float& x) { x = chance(); }
static void make(bf16& x) { x = to_bf16(chance()); }
static void make(int8_t& x) { x = int8_t(127 * chance()); }
static void make(half& x) { x.bits = uint16_t(32768 + 32767 * chance()), x.bits &= 0xbfff; }  // below 2, either sign

template <class W> static void check_products(int out, int in) {
    const int width = up(in, 32), stride = width + 32, blocks = up(out, BLOCK) / BLOCK, most = 70;
    std::vector<W> w(size_t(out) * in), packed(size_t(blocks) * BLOCK * width);
    std::vector<float> x(size_t(most) * stride), alone(size_t(most) * GROUP * BLOCK), sums(alone.size());
    for (W& one : w) make(one);
    for (int r = 0; r < most; r++)
        for (int k = 0; k < in; k++) x[size_t(r) * stride + k] = std::is_same_v<W, BrainDots> ? to_float(to_bf16(chance())) : chance();
    pack(packed.data(), w.data(), out, in);
    const Blocks<W> all{packed.data(), width};
    for (int count = 1; count <= std::min(GROUP, blocks); count++) {
        for (int r = 0; r < most; r++)
            multiply_vectors(1, {x.data() + size_t(r) * stride, stride, alone.data() + size_t(r) * GROUP * BLOCK, GROUP * BLOCK}, all, count, all);
        for (int r = 0; r < most; r += 23)
            for (int j = 0; j < std::min(out, count * BLOCK); j++) {
                double wanted = 0;
                for (int k = 0; k < in; k++) wanted += double(x[size_t(r) * stride + k]) * value(w[size_t(j) * in + k]);
                expect(is_near(alone[size_t(r) * GROUP * BLOCK + j], wanted, 1e-4), "a product", r, j);
            }
        for (int rows = 2; rows <= most; rows += rows < 20 ? 1 : 7) {
            multiply_vectors(rows, {x.data(), stride, sums.data(), GROUP * BLOCK}, all, count, all);
            for (int r = 0; r < rows; r++)
                expect(!memcmp(&sums[size_t(r) * GROUP * BLOCK], &alone[size_t(r) * GROUP * BLOCK], size_t(count) * BLOCK * 4), "a row's own bits", rows, r);
        }
    }
}

// Rows of a file: any bytes, but for the scale, 0.25 or a power of two, and an offset of -1.5 where there is one
template <class W> static std::vector<uint8_t> file_of(int rows, int in) {
    const int at = std::is_base_of_v<Scales, W> ? 208 : 0;
    std::vector<uint8_t> file(size_t(rows) * (in / W::WIDTH) * W::FILE_BYTES);
    for (size_t i = 0; i < file.size(); i++) file[i] = uint8_t(128 + 127 * chance());
    for (size_t i = 0; i < file.size(); i += W::FILE_BYTES) {
        if (std::is_base_of_v<UpperScale, W>) file[i] = uint8_t(120 + i / W::FILE_BYTES % 4);
        else file[i + at] = 0, file[i + at + 1] = 0x34;
        if (W::HAS_OFFSETS) file[i + 2] = 0, file[i + 3] = 0xbe;
    }
    return file;
}
// With float inputs: the bits of a product with the weights as floats, for any number of rows.
template <class W> static void check_unpacked(const std::vector<uint8_t>& file, std::vector<Place>& places, std::vector<float>& x, int out, int in) {
    const int most = 21, wide = GROUP * BLOCK, blocks = int(places.size());
    std::vector<float> weights(size_t(out) * in), floats(size_t(blocks) * BLOCK * in), found(most * wide), wanted(most * wide);
    for (int j = 0; j < out; j++) dequantise<W>(file.data() + j * (file.size() / out), in, &weights[size_t(j) * in]);
    pack(floats.data(), weights.data(), out, in);
    int chore = 0;
    const Group<float> rows{x.data(), in};
    const Blocks<float> all{floats.data(), in};
    const Blocks<Unpacked> stored{{places.data(), in}};
    multiply_group(most, rows, all, blocks, all, wanted.data(), chore);
    for (int some = 1; some <= most; some++) {
        multiply_group(some, rows, stored, blocks, stored, found.data(), chore);
        for (int r = 0; r < some; r++) expect(!memcmp(&found[r * wide], &wanted[r * wide], size_t(out) * 4), "float inputs", int(places[0].type), some);
    }
}
template <class W> static void check_stored(int type, int out, int in) {
    const int blocks = up(out, BLOCK) / BLOCK, most = 21, wide = GROUP * BLOCK;
    const std::vector<uint8_t> file = file_of<W>(out, in);
    const size_t row_bytes = file.size() / out;
    std::vector<FileRow> lines;
    for (int j = 0; j < out; j++) lines.push_back({int64_t(j * row_bytes), type});
    std::vector<char> packed(blocks * packed_size(type, in));
    std::vector<Place> places(blocks);
    pack_rows(places.data(), packed.data(), file.data(), lines.data(), out, in, 2);
    expect(packed_size(type, in) <= size_t(BLOCK) * row_bytes * 1.06, "no more memory than in the file", type);
    std::vector<float> x(size_t(most) * in), found(size_t(up(most, PANEL_ROWS)) * wide), alone(wide), weights(in);
    for (float& one : x) one = chance();
    check_unpacked<W>(file, places, x, out, in);
    RoundedRows rows, one;
    rows.reshape(most, in);
    for (int r = 0; r < most; r++) rows.round(r, &x[size_t(r) * in], in);
    int chore = 0;
    const Blocks<AnyStored> all{places.data(), in};
    multiply_group(most, rows.group(0), all, blocks, all, found.data(), chore);
    for (int r = 0; r < most; r++) {
        const auto scale = [&](int k) { return rows.span(r, k / SPAN).scale; };
        const auto number = [&](int k) { return rows.span(r, k / SPAN).numbers[k % SPAN]; };
        for (int j = 0; j < out; j++) {
            double wanted = 0, size = 0;
            dequantise<W>(file.data() + j * row_bytes, in, weights.data());
            for (int k = 0; k < in; k++) {
                const double product = double(scale(k)) * number(k) * weights[k];
                wanted += product, size += std::fabs(product);
            }
            expect(std::fabs(found[size_t(r) * wide + j] - wanted) <= 3e-6 * size, "a product with a stored matrix", type, j);
        }
        for (int k = 0; k < in; k++)
            expect(std::fabs(scale(k) * number(k) - x[size_t(r) * in + k]) <= 0.501f * scale(k), "rounding to 8 bits", r, k);
        one.reshape(1, in), one.round(0, &x[size_t(r) * in], in);
        multiply_group(1, one.group(0), all, blocks, all, alone.data(), chore);
        expect(!memcmp(&found[size_t(r) * wide], alone.data(), size_t(blocks) * BLOCK * 4), "a row's own bits, stored", r);
    }
    for (int some = 2; some < most; some += 3) {  // by vectors, and by tiles where there are any
        std::vector<float> fewer(found.size());
        multiply_group(some, rows.group(0), all, blocks, all, fewer.data(), chore);
        expect(!memcmp(fewer.data(), found.data(), size_t(some - 1) * wide * 4 + size_t(blocks) * BLOCK * 4), "the same bits for fewer rows", type, some);
    }
}
// Sums of 16 bits are near those of floats, and a row's bits are its own. That the bits are right: test_stored_gguf.py.
static void check_half_sums(int out, int in) {
    const int width = up(in, 32), blocks = up(out, BLOCK) / BLOCK, most = 21, wide = GROUP * BLOCK;
    std::vector<half> w(size_t(out) * in), packed(size_t(blocks) * BLOCK * width);
    for (half& one : w) make(one);
    pack(packed.data(), w.data(), out, in);
    expect(adds_halves(packed.data(), packed.size()) == ADDS_HALVES, "small weights may be added in 16 bits");
    packed[7].bits = 0xe000;
    expect(!adds_halves(packed.data(), packed.size()), "large weights may not");
    packed[7] = w[size_t(7) * in];
    std::vector<float> x(size_t(most) * width), found(size_t(up(most, HALF_ROWS)) * wide), alone(found.size());
    HalfRows rows, one;
    rows.reshape(most, in + 64);  // as for a wider matrix
    for (int r = 0; r < most; r++) {
        for (int k = 0; k < in; k++) x[size_t(r) * width + k] = 1000.0f * chance();
        rows.round(r, &x[size_t(r) * width], in);
    }
    int chore = 0;
    const Blocks<HalfSums> all{{packed.data(), width}};
    multiply_group(most, rows.group(0), all, blocks, all, found.data(), chore);
    for (int r = 0; ADDS_HALVES && r < most; r++) {
        one.reshape(1, in), one.round(0, &x[size_t(r) * width], in);
        multiply_group(1, one.group(0), all, blocks, all, alone.data(), chore);
        expect(!memcmp(&found[size_t(r) * wide], alone.data(), size_t(blocks) * BLOCK * 4), "a row's own bits, in halves", r);
        for (int j = 0; j < out; j++) {
            double wanted = 0, size = 0;
            for (int k = 0; k < in; k++) {
                const double product = double(x[size_t(r) * width + k]) * value(w[size_t(j) * in + k]);
                wanted += product, size += std::fabs(product);
            }
            expect(std::fabs(found[size_t(r) * wide + j] - wanted) <= 2e-3 * size, "a product in halves", r, j);
        }
    }
}
static void check_all_stored() {
    for (int type : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 19})
        with_type(type, [&]<class W>() { check_stored<W>(type, 61, W::WIDTH), check_stored<W>(type, 40, 3 * W::WIDTH); });
}

static void check_halves() {
    const uint16_t halves[LANES] = {0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x3c00, 0xbc00, 0x3555, 0x7bff, 0xfbff, 0x0200, 0x1234, 0xb333, 0x4d00, 0x7c00};
    float y[LANES];
    store(y, load_half(halves));
    for (int i = 0; i < LANES; i++) {
        const int h = halves[i], exponent = h >> 10 & 31, rest = h & 1023;
        const double size = exponent == 31 ? INFINITY : exponent ? std::ldexp(1024 + rest, exponent - 25) : std::ldexp(rest, -24);
        expect(y[i] == float(h & 0x8000 ? -size : size), "numbers of 16 bits", i);
    }
}

// Rows that share a past but for what each sees last: themselves
template <class T> static void check_attention(int rows, int heads, int dim, int size) {
    const int slots = size + rows, count = rows * heads, stride = up(slots, LANES) + LANES;
    std::vector<T> keys(size_t(slots) * dim), values(keys.size());
    std::vector<float> queries(size_t(count) * dim), space(size_t(count) * stride), out(queries.size()), alone(out.size());
    for (T& one : keys) make(one);
    for (T& one : values) make(one);
    for (float& one : queries) one = chance();
    std::vector<int32_t> last(2 * rows), pages(slots / 16 + 1);  // pages of sixteen tokens, one after the other
    for (size_t i = 0; i < pages.size(); i++) pages[i] = int32_t(i);
    const auto in_pages = [&](std::vector<T>& all) { return Slots<T>{all.data(), pages.data(), size_t(16) * dim, 4, dim}; };
    std::vector<Past<T>> pasts;
    std::vector<const float*> at;
    for (int r = 0; r < rows; r++) {
        last[2 * r] = size - 1, last[2 * r + 1] = size + r;
        pasts.push_back({in_pages(keys), in_pages(values), dim, 0, size - 1, &last[2 * r], 2, 0, dim});
        for (int h = 0; h < heads; h++) at.push_back(&queries[size_t(r * heads + h) * dim]);
    }
    attend<T>({pasts.data(), at.data(), rows, heads}, 0.25f, 0.0f, space.data(), stride, out.data());
    for (int r = 0; r < rows; r++)
        attend<T>({&pasts[r], &at[r * heads], 1, heads}, 0.25f, 0.0f, space.data(), stride, &alone[size_t(r) * heads * dim]);
    expect(!memcmp(out.data(), alone.data(), out.size() * 4), "a row's own bits, attention", rows, heads);
    for (int n = 0; n < count; n++)
        for (int d = 0; d < dim; d++) {
            double total = 0, wanted = 0;
            for (int i = 0; i <= size; i++) {
                const size_t from = size_t(pasts[n / heads].slot(i)) * dim;
                double score = 0;
                for (int j = 0; j < dim; j++) score += 0.25 * at[n][j] * value(keys[from + j]);
                total += std::exp(score), wanted += std::exp(score) * value(values[from + d]);
            }
            expect(is_near(out[size_t(n) * dim + d], wanted / total, 1e-5), "attention", n, d);
        }
}

int main() {
    expect(has_permission(), "asking for the tile registers");
    check_lanes(), check_halves();
    check_all_stored();
    check_half_sums(61, 96), check_half_sums(40, 70);
    for (int in : {32, 70}) check_products<float>(72, in), check_products<bf16>(72, in), check_products<int8_t>(72, in), check_products<half>(72, in);
    if (DOTS_BRAIN) check_products<BrainDots>(72, 32), check_products<BrainDots>(72, 70);
    for (int heads : {1, 3, 4, 7}) check_attention<float>(5, heads, 48, 37), check_attention<bf16>(2, heads, 64, 16), check_attention<float>(3, heads, 32, KEYS_AT_ONCE + 70);
    printf("%s %s\n", ISA_NAME, failures ? "fails" : "holds");
    return failures != 0;
}
