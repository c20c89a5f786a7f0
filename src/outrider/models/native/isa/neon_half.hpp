// Sums of products in IEEE's 16 bits: eight outputs at a time, where a core multiplies and adds such numbers (half_sums.hpp).
//
// Of each row, registers 16 on have the sums of even inputs for 8 and 8 outputs, then those of odd inputs; 0 to 3 are eight inputs of
// each row, 4 to 7 the weights of two inputs. A lane of a register is multiplied as it is: the compiler would spread it first.
#pragma once

constexpr bool ADDS_HALVES = true;
constexpr int HALF_ROWS = 4;  // rows that share one reading of the weights, and whose spans are neighbours

struct alignas(16) HalfSpan {
    half numbers[32];
    float scale;
    void put(V low, V high, float by) {
        for (int i = 0; i < PARTS; i++) {
            vst1_u16(&numbers[i * WIDE].bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)low.part[i])));
            vst1_u16(&numbers[LANES + i * WIDE].bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)high.part[i])));
        }
        scale = by;
    }
};
static_assert(sizeof(HalfSpan) == 80 && offsetof(HalfSpan, scale) == 64);

#define ONE(OP, SUM, W, X, LANE) OP " v" #SUM ".8h, v" #W ".8h, v" #X ".h[" #LANE "]\n"
#define ROW(OP, X, A, B, C, D, K, NEXT) ONE(OP, A, 4, X, K) ONE(OP, B, 5, X, K) ONE(OP, C, 6, X, NEXT) ONE(OP, D, 7, X, NEXT)
#define WEIGHTS "ldp q4, q5, [%[w]]\n ldp q6, q7, [%[w], 32]\n prfm pldl1keep, [%[w], 1024]\n add %[w], %[w], 64\n"
#define TWO_OF_1(OP, K, NEXT) WEIGHTS ROW(OP, 0, 16, 17, 18, 19, K, NEXT)
#define TWO_OF_2(OP, K, NEXT) TWO_OF_1(OP, K, NEXT) ROW(OP, 1, 20, 21, 22, 23, K, NEXT)
#define TWO_OF_4(OP, K, NEXT) TWO_OF_2(OP, K, NEXT) ROW(OP, 2, 24, 25, 26, 27, K, NEXT) ROW(OP, 3, 28, 29, 30, 31, K, NEXT)
#define INPUTS_OF_1(AT) "ldr q0, [%[x], " #AT "]\n"
#define INPUTS_OF_2(AT) INPUTS_OF_1(AT) "ldr q1, [%[x], 80 + " #AT "]\n"
#define INPUTS_OF_4(AT) INPUTS_OF_2(AT) "ldr q2, [%[x], 160 + " #AT "]\n ldr q3, [%[x], 240 + " #AT "]\n"
#define EIGHT(R, OP, AT) INPUTS_OF_##R(AT) TWO_OF_##R(OP, 0, 1) TWO_OF_##R("fmla", 2, 3) TWO_OF_##R("fmla", 4, 5) TWO_OF_##R("fmla", 6, 7)
#define WIDER(A, B) "fcvtl v" #B ".4s, v" #A ".4h\n fcvtl2 v" #A ".4s, v" #A ".8h\n"
#define ADD(TO, SUM) "fmla v" #TO ".4s, v" #SUM ".4s, v4.s[0]\n"
#define PUT(AT, A, B, C, D, TO) \
    "fadd v" #A ".8h, v" #A ".8h, v" #C ".8h\n fadd v" #B ".8h, v" #B ".8h, v" #D ".8h\n ldr s4, [%[x], " #AT " + 64]\n" \
    "ldp q8, q9, [%[" #TO "]]\n ldp q10, q11, [%[" #TO "], 32]\n" WIDER(A, C) WIDER(B, D) ADD(8, C) ADD(9, A) ADD(10, D) ADD(11, B) \
    "stp q8, q9, [%[" #TO "]]\n stp q10, q11, [%[" #TO "], 32]\n"
#define PUT_1 PUT(0, 16, 17, 18, 19, to)
#define PUT_2 PUT_1 PUT(80, 20, 21, 22, 23, to1)
#define PUT_4 PUT_2 PUT(160, 24, 25, 26, 27, to2) PUT(240, 28, 29, 30, 31, to3)
#define ALL(R) \
    __asm__ volatile("0:\n" EIGHT(R, "fmul", 0) EIGHT(R, "fmla", 16) EIGHT(R, "fmla", 32) EIGHT(R, "fmla", 48) PUT_##R \
                     "add %[x], %[x], %[apart]\n subs %[spans], %[spans], 1\n b.gt 0b\n" \
                     : [x] "+r"(x), [w] "+r"(w), [spans] "+r"(spans) \
                     : [apart] "r"(HALF_ROWS * sizeof(HalfSpan)), [to] "r"(sums), [to1] "r"(to1), [to2] "r"(to2), [to3] "r"(to3) \
                     : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16", "v17", "v18", "v19", \
                       "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")
// sums[row * wide + output] = R rows, 1, 2 or 4, times a block
template <int R> static void multiply_halves(const HalfSpan* x, const half* w, size_t spans, float* sums, size_t wide) {
    float *to1 = sums + wide, *to2 = to1 + wide, *to3 = to2 + wide;
    for (int r = 0; r < R; r++) memset(sums + r * wide, 0, LANES * sizeof(float));
    if constexpr (R == 1) ALL(1);
    else if constexpr (R == 2) ALL(2);
    else ALL(4);
}
#undef ONE
#undef ROW
#undef WEIGHTS
#undef TWO_OF_1
#undef TWO_OF_2
#undef TWO_OF_4
#undef INPUTS_OF_1
#undef INPUTS_OF_2
#undef INPUTS_OF_4
#undef EIGHT
#undef WIDER
#undef ADD
#undef PUT
#undef PUT_1
#undef PUT_2
#undef PUT_4
#undef ALL
