/* Vectors of fp32 as wide as the processor has them. */

#include <string.h>

#include "numbers.h"

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));

/* `from` (rows, size), in rows of `from_row`, to `to` (size, rows); rows and size are multiples of LANES. A pass merges the
   first half of the vectors with the second, element by element: after log2(LANES) of them they are turned. */
static void transposed(const float *from, long from_row, long rows, long size, float *to) {
    for (long d = 0; d < size; d += LANES)
        for (long i = 0; i < rows; i += LANES) {
            vector a[LANES], b[LANES];
            for (int r = 0; r < LANES; r++) a[r] = *(vector *)(from + (i + r) * from_row + d);
#pragma GCC unroll 4
            for (int pass = 1; pass < LANES; pass *= 2) {
                for (int r = 0; r < LANES; r++) b[r] = r % 2 ? PICK(a[r / 2], a[(r + LANES) / 2], HIGH) : PICK(a[r / 2], a[(r + LANES) / 2], LOW);
                memcpy(a, b, sizeof a);
            }
            for (int r = 0; r < LANES; r++) *(vector *)(to + (d + r) * rows + i) = a[r];
        }
}
