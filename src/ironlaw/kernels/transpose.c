#include "vectors.h"

/* A matrix `from` (rows, columns) to `to` (columns, rows), both contiguous, their sizes multiples of LANES. */
void transpose(const float *from, long rows, long columns, float *to, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long d = 0; d < columns; d += LANES) transposed(from + d, columns, rows, LANES, to + d * rows);
}
