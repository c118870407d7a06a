/* Products of a few or many rows with weights that are only read, for AVX-512 and AVX2: fp32, bf16, int8 and int4.

   A weight (outputs, inputs) lies as (outputs / TILE, inputs / PACK, TILE, PACK), padded with zeros to whole tiles: PACK
   elements fill 4 bytes, and every step of the inner loop reads two vectors of weights, one after the other through
   memory, and 4 bytes of each row. Sums are fp32, of int8 int32. Inputs of int8 are codes, with a scale a row; AVX-512
   multiplies codes + 128, and starts from sums that take the 128 off again.

   Of int4 (codes + 8, an fp16 scale per SHARED_BY inputs) a step is one vector: the tile's first half in the low bits, the
   other half in the high ones. A group's sums start at -8 times its inputs added up, which takes the 8 off again;
   inputs are signed codes, and these starts lie behind the codes of all rows. */

#include <stdlib.h>
#include <string.h>

#include "numbers.h"

/* MOST: rows whose sums stay in registers, two vectors for each beside the operands. */
#if LANES == 16
#include <immintrin.h>
#define ROWS 12
#define MOST(format) ((format) == INT4 ? 6 : 12) /* of int4 a group's sums stay there beside the others */
#define WIDE(name) _mm512_##name
#define WHOLE(name) _mm512_##name##_si512
#define LOADED(at) _mm512_loadu_si512(at)
#define AS_FLOATS(x) _mm512_castsi512_ps(x)
#define HALVES(at) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at)))
typedef __m512 floats;
typedef __m512i words;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define ROWS 6
#define MOST(format) ((format) == FP32 ? 6 : (format) == INT4 ? 3 : 4)
#define WIDE(name) _mm256_##name
#define WHOLE(name) _mm256_##name##_si256
#define LOADED(at) _mm256_loadu_si256((const __m256i *)(at))
#define AS_FLOATS(x) _mm256_castsi256_ps(x)
#define HALVES(at) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at)))
typedef __m256 floats;
typedef __m256i words;
#endif

#define TILE (2 * LANES) /* outputs whose sums stay in registers */
#define SHARED_BY 32 /* inputs that share a scale in int4 */

enum { NONE, RELU, SQUARED_RELU, SILU, GELU, GELU_TANH };

/* e^x for x <= 0: 2^n times a polynomial of the rest (the terms of its series, up to 1e-7 of the value). */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    int32_t n = (int32_t)(x * 1.44269504f - 0.5f);
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (8.33333333e-3f + r * 1.38888889e-3f)))));
    union { int32_t bits; float value; } u = {(int32_t)((uint32_t)(n + 127) << 23)};
    return p * u.value;
}

static inline float hyperbolic_tangent(float x) {
    float e = exponential(x < 0 ? 2 * x : -2 * x), t = (1 - e) / (1 + e);
    return x < 0 ? -t : t;
}

static inline float error_function(float x) { /* Abramowitz and Stegun 7.1.26, up to 1.5e-7 */
    float a = x < 0 ? -x : x, t = 1 / (1 + 0.3275911f * a);
    float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float e = 1 - p * exponential(-a * a);
    return x < 0 ? -e : e;
}

static inline float activated(float x, int how) {
    float positive = x > 0 ? x : 0;
    if (how == RELU) return positive;
    if (how == SQUARED_RELU) return positive * positive;
    if (how == SILU) {
        float e = exponential(x < 0 ? x : -x);
        return x * (x < 0 ? e : 1) / (1 + e);
    }
    if (how == GELU) return 0.5f * x * (1 + error_function(x * 0.707106781f));
    if (how == GELU_TANH) return 0.5f * x * (1 + hyperbolic_tangent(0.797884561f * (x + 0.044715f * x * x * x)));
    return x;
}

typedef struct {
    const void *weight;
    const float *bias, *scales; /* of outputs, or NULL; scales of int8 */
    const int32_t *sums;        /* of int8: each output's codes times -128 added up */
    const uint16_t *groups;     /* of int4: fp16 scales (outputs / TILE, inputs / SHARED_BY, TILE) */
    int32_t inputs, outputs, format;
} Linear;

typedef struct { /* where the rows of a product go, (rows, outputs): added up in fp32, or stored */
    float *sum;
    void *out;
    const void *times; /* what the activated product is multiplied by, of the type of `out`; or NULL */
    float factor;      /* of what is added to `sum` */
    int32_t activation, is_bf16;
} Result;

int formats(void) { /* that this processor multiplies: a bit each */
    int known = 0;
#ifdef WIDE
    known |= 1 << FP32;
#if LANES == 8 || defined(__AVX512BF16__)
    known |= 1 << BF16;
#endif
#if LANES == 8 || defined(__AVX512VNNI__)
    known |= 1 << INT8 | 1 << INT4;
#endif
#endif
    return known;
}

int lanes(void) { return LANES; }

#ifdef WIDE
#define INLINE static inline __attribute__((always_inline))

INLINE floats multiplied(floats sum, words weight, words x, int format) {
#ifdef __AVX512BF16__
    if (format == BF16) return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)x);
#elif LANES == 8
    if (format == BF16) { /* each of a pair as the upper half of fp32 */
        const words upper = WIDE(set1_epi32)((int)0xffff0000);
        sum = WIDE(fmadd_ps)(AS_FLOATS(WIDE(slli_epi32)(weight, 16)), AS_FLOATS(WIDE(slli_epi32)(x, 16)), sum);
        weight = WHOLE(and)(weight, upper), x = WHOLE(and)(x, upper);
    }
#endif
    return WIDE(fmadd_ps)(AS_FLOATS(weight), AS_FLOATS(x), sum);
}

/* Products of 4 bytes each, `codes` signed and `x` not, added up. */
INLINE words multiplied_codes(words sum, words codes, words x) {
#if LANES == 8 /* pairs fit 16 bits where x is below 129 */
    return WIDE(add_epi32)(sum, WIDE(madd_epi16)(WIDE(maddubs_epi16)(x, codes), WIDE(set1_epi16)(1)));
#elif defined(__AVX512VNNI__)
    /* GCC 12 copies the sums around its own intrinsic, which took twice as long. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(codes));
#endif
    return sum;
}

/* The same of a weight and inputs of int8. */
INLINE words multiplied_int8(words sum, words weight, words x) {
#if LANES == 8
    return multiplied_codes(sum, WIDE(sign_epi8)(x, weight), WIDE(abs_epi8)(weight));
#else
    return multiplied_codes(sum, weight, x);
#endif
}

/* Sums of one tile's outputs for `rows` rows of `steps` times 4 bytes, which lie (steps, rows). What is at
   `next`, `along` further with every step, is fetched meanwhile: the tile after this one, while its products are made. */
INLINE void tile(const char *weight, const int32_t *x, const int32_t *first, long steps, int rows, int format,
                 const char *next, long along, float out[ROWS][TILE]) {
    floats sums[ROWS][2];
    words whole[ROWS][2]; /* sums of int8 */
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            if (format == INT8) whole[r][half] = LANES == 8 ? WIDE(set1_epi32)(0) : LOADED(first + LANES * half);
            else sums[r][half] = WIDE(setzero_ps)();
    for (long k = 0; k < steps; k++, weight += 4 * TILE, next += along, x += rows) {
        words parts[2] = {LOADED(weight), LOADED(weight + 4 * LANES)};
        _mm_prefetch(next, _MM_HINT_T1);
        _mm_prefetch(next + 4 * LANES, _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            words here = WIDE(set1_epi32)(x[r]);
            for (int half = 0; half < 2; half++)
                if (format == INT8) whole[r][half] = multiplied_int8(whole[r][half], parts[half], here);
                else sums[r][half] = multiplied(sums[r][half], parts[half], here, format);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            WIDE(storeu_ps)(out[r] + LANES * half, format == INT8 ? WIDE(cvtepi32_ps)(whole[r][half]) : sums[r][half]);
}

/* The same of int4, with all scales: `x` signed codes, `first` the starts of each row's groups, `scale` of each row. */
INLINE void tile4(const char *weight, const uint16_t *groups, const int32_t *x, const int32_t *first,
                  const float *scale, long count, int rows, float out[ROWS][TILE]) {
    const words low = WIDE(set1_epi8)(15);
    floats sums[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = WIDE(setzero_ps)();
    for (long g = 0; g < count; g++, groups += TILE) {
        words whole[ROWS][2];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) whole[r][0] = whole[r][1] = WIDE(set1_epi32)(first[r * count + g]);
#pragma GCC unroll 8
        for (int k = 0; k < SHARED_BY / 4; k++, weight += 2 * TILE) {
            words both = LOADED(weight);
            words parts[2] = {WHOLE(and)(both, low), WHOLE(and)(WIDE(srli_epi16)(both, 4), low)};
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                words here = WIDE(set1_epi32)(x[(r * count + g) * (SHARED_BY / 4) + k]);
                for (int half = 0; half < 2; half++) whole[r][half] = multiplied_codes(whole[r][half], here, parts[half]);
            }
        }
        for (int half = 0; half < 2; half++) {
            floats factor = HALVES(groups + LANES * half);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                sums[r][half] = WIDE(fmadd_ps)(WIDE(cvtepi32_ps)(whole[r][half]), factor, sums[r][half]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            WIDE(storeu_ps)(out[r] + LANES * half, WIDE(mul_ps)(sums[r][half], WIDE(set1_ps)(scale[r])));
}

#define CASE4(n) case n: tile4(weight, groups, x, first, scale, count, n, out); break;
static void tiles4(const char *weight, const uint16_t *groups, const int32_t *x, const int32_t *first,
                   const float *scale, long count, int rows, float out[ROWS][TILE]) {
    switch (rows) {
        CASE4(1) CASE4(2) CASE4(3)
#if LANES == 16
        CASE4(4) CASE4(5) CASE4(6)
#endif
    }
}

#define CASE(n) case n: tile(weight, x, first, steps, n, format, next, along, out); break;
INLINE void tiles(const char *weight, const int32_t *x, const int32_t *first, long steps, int rows, int format,
                  const char *next, long along, float out[ROWS][TILE]) {
    switch (rows) { /* constants: all sums stay in registers */
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

static void finish(const Linear *l, const Result *to, const float *scale, long row, long first, float *sums) {
    int count = l->outputs - first < TILE ? l->outputs - first : TILE;
    long at = row * l->outputs + first;
    if (l->scales)
        for (int n = 0; n < count; n++) sums[n] *= *scale * l->scales[first + n];
    if (l->bias)
        for (int n = 0; n < count; n++) sums[n] += l->bias[first + n];
    if (to->activation)
        for (int n = 0; n < count; n++) sums[n] = activated(sums[n], to->activation);
    if (to->times && to->is_bf16)
        for (int n = 0; n < count; n++) sums[n] *= widened(((const bf16 *)to->times)[at + n]);
    else if (to->times)
        for (int n = 0; n < count; n++) sums[n] *= ((const float *)to->times)[at + n];
    if (to->sum)
        for (int n = 0; n < count; n++) to->sum[at + n] += to->factor * sums[n];
    else if (to->is_bf16)
        for (int n = 0; n < count; n++) ((bf16 *)to->out)[at + n] = narrowed(sums[n]);
    else
        for (int n = 0; n < count; n++) ((float *)to->out)[at + n] = sums[n];
}

/* (rows, steps) as (rows / each, steps, each): the rows of a part lie together, on different lines of the cache. NULL where
   there is no memory for them. */
static const int32_t *interleaved(const int32_t *x, long rows, long steps, long each) {
    static __thread int32_t *space;
    static __thread long held;
    if (rows < 2) return x;
    if (held < rows * steps) {
        free(space);
        space = malloc(4 * (held = 2 * rows * steps));
        if (!space) return held = 0, NULL;
    }
    int32_t *to = space;
    for (long row = 0; row < rows; row += each)
        for (long k = 0; k < steps; k++)
            for (long r = row; r < rows && r < row + each; r++) *to++ = x[r * steps + k];
    return space;
}

/* `x` (rows, inputs) in the format of the weight, of int8 with `scales` of its rows. 0, or 1 where there was no memory. */
int product(const Linear *l, const void *x, const float *scales, const Result *to, long rows, int threads) {
    if (rows < 1) return 0;
    int most = MOST(l->format);
    long steps = l->inputs * (l->format == FP32 ? 4L : l->format == BF16 ? 2L : 1L) / 4, parts = (rows + most - 1) / most;
    long each = (rows + parts - 1) / parts, count4 = l->inputs / SHARED_BY;
    const int32_t *starts = (const int32_t *)x + rows * steps; /* of int4 */
    const int32_t *inputs = l->format == INT4 ? x : interleaved(x, rows, steps, each);
    if (!inputs) return 1;
    long ahead = parts < 4 ? parts : 4; /* of the first parts, which fetch the next tile; of few rows memory is all there is */
    ahead = rows < 6 ? 0 : ahead;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long first = 0; first < l->outputs; first += TILE) {
        const char *weight = (const char *)l->weight + first * steps * (l->format == INT4 ? 2 : 4);
        const int32_t *start = l->sums ? l->sums + first : 0;
        float out[ROWS][TILE];
        for (long row = 0; row < rows; row += each) {
            int count = rows - row < each ? rows - row : each;
            const int32_t *here = inputs + row * steps;
            long part = row / each, along = part < ahead ? 4 * TILE / ahead : 0;
            const char *next = along ? weight + (4 * TILE + part * along) * steps : weight;
            if (l->format == FP32) tiles(weight, here, start, steps, count, FP32, next, along, out);
            else if (l->format == BF16) tiles(weight, here, start, steps, count, BF16, next, along, out);
            else if (l->format == INT8) tiles(weight, here, start, steps, count, INT8, next, along, out);
            else tiles4(weight, l->groups + first * count4, here, starts + row * count4, scales + row, count4, count, out);
            for (int r = 0; r < count; r++) finish(l, to, scales + row + r, row + r, first, out[r]);
        }
    }
    return 0;
}

/* Rows in 8 bits, as a weight of int8 or int4 takes them: the largest magnitude becomes 127. A row with infinities or NaN
   has the scale NaN. */
void quantize(const float *x, uint8_t *codes, float *scales, long rows, long inputs, int format) {
    int32_t *start = (int32_t *)(codes + rows * inputs);
    for (long r = 0; r < rows; r++, x += inputs, codes += inputs) {
        float most = 1e-30f, zero = 0;
        for (long k = 0; k < inputs; k++) {
            float magnitude = x[k] < 0 ? -x[k] : x[k];
            most = magnitude > most ? magnitude : most;
            zero += magnitude * 0;
        }
        float factor = 127 / most;
        if (zero == 0)
            for (long k = 0; k < inputs; k++) codes[k] = (uint8_t)(int32_t)(x[k] * factor + 128.5f);
        else
            memset(codes, 128, inputs);
        scales[r] = most / 127 + zero;
        for (long k = 0; format == INT8 && LANES == 8 && k < inputs; k++) codes[k] ^= 128;
        for (long k = 0; format == INT4 && k < inputs; k += SHARED_BY) {
            int32_t sum = 0;
            for (long i = k; i < k + SHARED_BY; i++) sum += (int8_t)(codes[i] ^= 128);
            *start++ = -8 * sum;
        }
    }
}
#endif
