// Four rows times sixteen outputs, in registers 0 to 15; 16 to 19 are four inputs of each row, 20 to 27 weights of two inputs.
//
// A number that is a lane of a register is multiplied as it is. The compiler spreads it over a register first, which takes a product's
// turn, and stores sums on the way.
#pragma once

constexpr bool HAS_PANELS = true;

#define LANE(R, SUM, W, L) "fmla v" #SUM ".4s, v" #W ".4s, v" #R ".s[" #L "]\n"
#define ROW(R, A, B, C, D, W0, W1, W2, W3, L) LANE(R, A, W0, L) LANE(R, B, W1, L) LANE(R, C, W2, L) LANE(R, D, W3, L)
#define FOUR(W0, W1, W2, W3, L) \
    ROW(16, 0, 1, 2, 3, W0, W1, W2, W3, L) ROW(17, 4, 5, 6, 7, W0, W1, W2, W3, L) \
    ROW(18, 8, 9, 10, 11, W0, W1, W2, W3, L) ROW(19, 12, 13, 14, 15, W0, W1, W2, W3, L)
#define FETCH(A, B, C, D) "ldp q" #A ", q" #B ", [%[w]]\n ldp q" #C ", q" #D ", [%[w], 32]\n add %[w], %[w], %[apart]\n"
#define LATER "prfm pldl2keep, [%[later]]\n add %[later], %[later], %[step]\n"
#define LOAD(A, B, C, D, FROM) "ldp q" #A ", q" #B ", [%[" #FROM "]]\n ldp q" #C ", q" #D ", [%[" #FROM "], 32]\n"
#define STORE(A, B, C, D, TO) "stp q" #A ", q" #B ", [%[" #TO "]]\n stp q" #C ", q" #D ", [%[" #TO "], 32]\n"
// sums[row][output] += rows[row][k] * w[k * apart + output], for k in order below `width`, a multiple of four. A line of what is
// multiplied later is brought near for every k.
static void multiply_panel(const float* const (&rows)[4], const float* w, size_t apart, size_t width, float* const (&sums)[4], Later of) {
    const float *x = rows[0], *x1 = rows[1], *x2 = rows[2], *x3 = rows[3];
    const char* later = of.at;
    __asm__ volatile(
        LOAD(0, 1, 2, 3, to) LOAD(4, 5, 6, 7, to1) LOAD(8, 9, 10, 11, to2) LOAD(12, 13, 14, 15, to3)
        "0:\n ldr q16, [%[x]], 16\n ldr q17, [%[x1]], 16\n ldr q18, [%[x2]], 16\n ldr q19, [%[x3]], 16\n"
        FETCH(20, 21, 22, 23) FETCH(24, 25, 26, 27) LATER FOUR(20, 21, 22, 23, 0)
        FETCH(20, 21, 22, 23) LATER FOUR(24, 25, 26, 27, 1)
        FETCH(24, 25, 26, 27) LATER FOUR(20, 21, 22, 23, 2)
        "subs %[width], %[width], 4\n" LATER FOUR(24, 25, 26, 27, 3)
        "b.gt 0b\n"
        STORE(0, 1, 2, 3, to) STORE(4, 5, 6, 7, to1) STORE(8, 9, 10, 11, to2) STORE(12, 13, 14, 15, to3)
        : [x] "+r"(x), [x1] "+r"(x1), [x2] "+r"(x2), [x3] "+r"(x3), [w] "+r"(w), [width] "+r"(width), [later] "+r"(later)
        : [step] "r"(size_t(of.step)), [apart] "r"(4 * apart), [to] "r"(sums[0]), [to1] "r"(sums[1]), [to2] "r"(sums[2]), [to3] "r"(sums[3])
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17",
          "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27");
}
#undef LANE
#undef ROW
#undef FOUR
#undef FETCH
#undef LATER
#undef LOAD
#undef STORE
