// float16 by name alone: nothing runs it on a CPU.
#pragma once

#include <cstdint>

struct __half {
  uint16_t bits;
};
float __half2float(__half x);
__half __float2half_rn(float x);
