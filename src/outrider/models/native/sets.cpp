// The instruction sets that this processor has, the best first: those of isa/, by name (instruction_sets.py).
//
// It is compiled for any processor, so that it can be asked before code of a set is loaded. A set is named only if the processor has
// every instruction that the flags of instruction_sets.py let a compiler use for it.
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#include <sys/types.h>
#endif

namespace {
#if defined(__x86_64__)
// Leaf 1: conversion of numbers of 16 bits, and moves in the other order of bytes. Leaf 0x80000001: counting of leading zeros.
// Compilers may use all three for x86-64-v3, and not every one of them can be asked for them by name.
bool has_small_parts_of_v3() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 29 & 1) || !(c >> 22 & 1)) return false;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c >> 5 & 1);
}
bool has_v3() {  // x86-64-v3
    return has_small_parts_of_v3() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
bool has_v4() {  // x86-64-v4
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
// Bits of leaf 7: VNNI, the bfloat16 of AVX-512, tiles, and those of bfloat16 and of 8 bits. Compilers differ in their names.
bool has_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
}
bool has_brain() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
bool has_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
}
const char* best() {
    __builtin_cpu_init();
    if (has_v4() && has_vnni() && has_brain())
        return has_tiles() ? "amx avx512_bf16 avx512_vnni avx512 avx2 generic" : "avx512_bf16 avx512_vnni avx512 avx2 generic";
    if (has_v4() && has_vnni()) return "avx512_vnni avx512 avx2 generic";
    return has_v4() ? "avx512 avx2 generic" : has_v3() ? "avx2 generic" : "generic";
}
#elif defined(__aarch64__)
struct Has { bool dot, i8mm, brain; };  // dot: and arithmetic in 16 bits; brain: products of bfloat16
#if defined(__linux__)
Has has() {
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    return {(first >> 20 & 1) && (first >> 10 & 1), bool(second >> 13 & 1), bool(second >> 14 & 1)};  // ASIMDDP and ASIMDHP, I8MM, BF16
}
#elif defined(__APPLE__)
bool is_set(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
Has has() {
    return {is_set("hw.optional.arm.FEAT_DotProd") && is_set("hw.optional.arm.FEAT_FP16"), is_set("hw.optional.arm.FEAT_I8MM"),
            is_set("hw.optional.arm.FEAT_BF16")};
}
#else
Has has() { return {}; }
#endif
const char* best() {
    const Has found = has();
    if (found.dot && found.i8mm && found.brain) return "neon_bf16 neon_i8mm neon_dot neon generic";
    if (found.dot && found.i8mm) return "neon_i8mm neon_dot neon generic";
    return found.dot ? "neon_dot neon generic" : "neon generic";
}
#else
const char* best() { return "generic"; }
#endif
}  // namespace

extern "C" const char* outrider_sets() { return best(); }
