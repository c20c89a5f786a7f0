// What every instruction set promises, checked against plain loops: compiled and run by test_native_isa.py, natively or emulated.
#include <cmath>
#include <cstdio>
#include <vector>

#include "attention.hpp"
#include "matmul.hpp"
#include "stored.hpp"

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
    V many[LANES];
    double wanted[LANES] = {};
    for (int i = 0; i < LANES; i++) {
        for (float& one : x) wanted[i] += one = chance();
        many[i] = load(x);
        expect(is_near(sum(many[i]), wanted[i], 1e-6), "sum", i);
    }
    store(y, sums(many));
    for (int i = 0; i < LANES; i++) expect(is_near(y[i], wanted[i], 1e-6), "sums", i);
}

static float value(float x) { return x; }
static float value(bf16 x) { return to_float(x); }
static float value(int8_t x) { return x; }
static void make(float& x) { x = chance(); }
static void make(bf16& x) { x = to_bf16(chance()); }
static void make(int8_t& x) { x = int8_t(127 * chance()); }

template <class W> static void check_products(int out, int in) {
    const int width = up(in, 32), stride = width + 32, blocks = up(out, BLOCK) / BLOCK, most = 70;
    std::vector<W> w(size_t(out) * in), packed(size_t(blocks) * BLOCK * width);
    std::vector<float> x(size_t(most) * stride), alone(size_t(most) * GROUP * BLOCK), sums(alone.size());
    for (W& one : w) make(one);
    for (int r = 0; r < most; r++)
        for (int k = 0; k < in; k++) x[size_t(r) * stride + k] = chance();
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

// Of a file's block of 32: the scale 0.25 and, where there are some, the offset -1.5, as numbers of 16 bits; then any weights
template <class W> static float stored_weight(const uint8_t* block, int k) {
    const uint8_t* numbers = block + (W::HAS_OFFSETS ? 4 : 2);
    if (W::BITS == 8) return 0.25f * int8_t(numbers[k]);
    return 0.25f * (int(k < 16 ? numbers[k] & 15 : numbers[k - 16] >> 4) - W::ZERO) - (W::HAS_OFFSETS ? 1.5f : 0.0f);
}
template <class W> static void check_stored(int out, int in) {
    const int blocks = up(out, BLOCK) / BLOCK, spans = in / SPAN, most = 11, wide = GROUP * BLOCK;
    std::vector<uint8_t> file(size_t(out) * spans * W::FILE_BYTES);
    for (size_t i = 0; i < file.size(); i++) file[i] = uint8_t(128 + 127 * chance());
    for (size_t i = 0; i < file.size(); i += W::FILE_BYTES) {
        file[i] = 0, file[i + 1] = 0x34;
        if (W::HAS_OFFSETS) file[i + 2] = 0, file[i + 3] = 0xbe;
    }
    std::vector<W> packed(size_t(blocks) * spans);
    std::vector<float> x(size_t(most) * in), found(size_t(most) * wide), alone(wide);
    for (float& one : x) one = chance();
    RoundedRows rows;
    rows.reshape(most, in);
    for (int r = 0; r < most; r++) rows.round(r, &x[size_t(r) * in], in);
    pack_stored(packed.data(), file.data(), out, in);
    int chore = 0;
    const Blocks<W> all{packed.data(), in};
    multiply_group(most, rows.group(0), all, blocks, all, found.data(), chore);
    for (int r = 0; r < most; r++) {
        const Rounded row = rows.group(r);
        for (int j = 0; j < out; j++) {
            double wanted = 0;
            for (int k = 0; k < in; k++)
                wanted += double(row.span(0, k / SPAN).scale) * row.numbers[k] * stored_weight<W>(&file[(size_t(j) * spans + k / SPAN) * W::FILE_BYTES], k % SPAN);
            expect(is_near(found[size_t(r) * wide + j], wanted, 1e-4), "a product with a stored matrix", r, j);
        }
        for (int k = 0; k < in; k++)
            expect(std::fabs(row.span(0, k / SPAN).scale * row.numbers[k] - x[size_t(r) * in + k]) <= 0.501f * row.span(0, k / SPAN).scale, "rounding to 8 bits", r, k);
        multiply_group(1, row, all, blocks, all, alone.data(), chore);
        expect(!memcmp(&found[size_t(r) * wide], alone.data(), size_t(blocks) * BLOCK * 4), "a row's own bits, stored", r);
    }
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

template <class T> static void check_attention(int heads, int dim, int size) {
    std::vector<T> keys(size_t(size) * dim), values(keys.size());
    std::vector<float> queries(size_t(heads) * dim), space(size_t(MAX_TOGETHER) * up(size, LANES)), out(queries.size());
    for (T& one : keys) make(one);
    for (T& one : values) make(one);
    for (float& one : queries) one = chance();
    const int32_t last = size - 1;
    const Past<T> past{keys.data(), values.data(), dim, 0, size - 1, &last, 1, 0};
    attend(past, queries.data(), heads, 0.25f, 0.0f, space.data(), up(size, LANES), out.data());
    for (int h = 0; h < heads; h++)
        for (int d = 0; d < dim; d++) {
            double total = 0, wanted = 0;
            for (int i = 0; i < size; i++) {
                double score = 0;
                for (int j = 0; j < dim; j++) score += 0.25 * queries[size_t(h) * dim + j] * value(keys[size_t(i) * dim + j]);
                total += std::exp(score), wanted += std::exp(score) * value(values[size_t(i) * dim + d]);
            }
            expect(is_near(out[size_t(h) * dim + d], wanted / total, 1e-5), "attention", h, d);
        }
}

int main() {
    check_lanes(), check_halves();
    for (int in : {32, 224}) check_stored<Q8_0>(61, in), check_stored<Q4_0>(61, in), check_stored<Q4_1>(40, in);
    for (int in : {32, 70}) check_products<float>(72, in), check_products<bf16>(72, in), check_products<int8_t>(72, in);
    for (int heads : {1, 3, 4, 7}) check_attention<float>(heads, 48, 37), check_attention<bf16>(heads, 64, 16);
    printf("%s %s\n", ISA_NAME, failures ? "fails" : "holds");
    return failures != 0;
}
