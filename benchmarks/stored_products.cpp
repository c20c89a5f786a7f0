// CPU milliseconds of products with one stored matrix of every type, the least of several: "TYPE ROWS MS" lines.
// Compiled by stored_products.py with the flags of an instruction set, also against the sources of another version.
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "stored.hpp"

constexpr int OUT = 576, IN = 1536, REPEATS = 15;

static double cpu_ms() {
    return 1e3 * double(clock()) / CLOCKS_PER_SEC;
}
template <class W> static void measure(const char* name, int type) {
    const int blocks = OUT / BLOCK, row_bytes = IN / W::WIDTH * W::FILE_BYTES;
    std::vector<uint8_t> file(size_t(OUT) * row_bytes);
    for (uint8_t& one : file) one = uint8_t(rand());
    for (size_t i = 0; i < file.size(); i += W::FILE_BYTES) {  // a scale of 0.25, and an offset of -1.5 where there is one
        const size_t at = i + (std::is_base_of_v<Scales, W> ? 208 : 0);
        file[at] = 0, file[at + 1] = 0x34;
        if (W::HAS_OFFSETS) file[i + 2] = 0, file[i + 3] = 0xbe;
    }
    std::vector<FileRow> lines;
    for (int j = 0; j < OUT; j++) lines.push_back({int64_t(j) * row_bytes, type});
    Memory<char> packed;
    packed.grow(blocks * packed_size(type, IN));
    std::vector<Place> places(blocks);
    pack_rows(places.data(), packed.data(), file.data(), lines.data(), OUT, IN, 1);
    std::vector<float> x(size_t(MOST_ROWS) * IN);
    for (float& one : x) one = float(rand() % 2001 - 1000) / 1000;
    RoundedRows rows;
    rows.reshape(MOST_ROWS, IN);
    for (int r = 0; r < MOST_ROWS; r++) rows.round(r, &x[size_t(r) * IN], IN);
    Memory<float> found;
    found.grow(size_t(MOST_ROWS) * GROUP * BLOCK);
    int chore = 0;
    for (const int num : {1, 4, 16, 64}) {
        double least = 1e9;
        for (int repeat = 0; repeat < REPEATS; repeat++) {
            const double began = cpu_ms();
            for (int again = 0; again < 64 / num; again++)
                for (int b = 0; b < blocks; b += GROUP) {
                    const Blocks<AnyStored> at{places.data() + b, IN};
                    multiply_group(num, rows.group(0), at, std::min(GROUP, blocks - b), at, found.data(), chore);
                }
            least = std::min(least, (cpu_ms() - began) * num / 64);
        }
        printf("%s %d %.5f\n", name, num, least);
    }
}
int main() {
    if (!has_permission()) return 1;
    measure<Q8_0>("Q8_0", 1), measure<Q4_0>("Q4_0", 2), measure<Q4_1>("Q4_1", 3), measure<Q5_0>("Q5_0", 4);
    measure<Q4_K>("Q4_K", 6), measure<Q5_K>("Q5_K", 7), measure<Q6_K>("Q6_K", 8);
}
