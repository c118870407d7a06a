/* Numbers of fp32 in a vector, formats by their numbers in `library.py`, bfloat16, and the type that a source is compiled
   for (ACTIVATION). */

#include <stdint.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8
#endif

#define FP32 0
#define BF16 1
#define INT8 2
#define FP8 3
#define INT4 4

typedef uint16_t bf16;

static inline float widened(bf16 x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

static inline bf16 narrowed(float x) { /* to the nearest, ties to even */
    union { float value; uint32_t bits; } u = {x};
    return (bf16)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}

#ifdef ACTIVATION
#if ACTIVATION == FP32
typedef float activation;
#define READ(x) (x)
#define WRITE(x) (x)
#else
typedef bf16 activation;
#define READ(x) widened(x)
#define WRITE(x) narrowed(x)
#endif
#endif
