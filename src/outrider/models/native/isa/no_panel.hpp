// Sets whose products the compiler does well enough.
#pragma once
constexpr bool HAS_PANELS = false;
INLINE void multiply_panel(const float* const (&)[4], const float*, size_t, size_t, float* const (&)[4], Later) {}
