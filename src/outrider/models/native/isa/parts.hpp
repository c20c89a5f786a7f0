// The vector types of sets whose registers hold PART_BYTES.
#pragma once
#include "number.hpp"

typedef float Floats __attribute__((vector_size(PART_BYTES)));
typedef int32_t Ints __attribute__((vector_size(PART_BYTES)));
typedef uint32_t Words __attribute__((vector_size(PART_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(PART_BYTES / 2)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInts __attribute__((vector_size(16)));
