/* Causal attention of whole sequences and its derivative, without the scores in memory (arXiv 2205.14135).

   A task is one sequence and one key/value head, with all query heads that share it. It works on some BLOCK queries at
   a time and all keys up to their end, in fp32 whatever the tensors are: keys and values are copied once into rows and
   columns that the products read in order. Of the forward pass only the logarithm of each query's sum is kept. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define ROWS (LANES / 2) /* of a tile: with two vectors each, what the registers hold */
#define TILE (2 * LANES)
#define BLOCK 32
#define DEPTH 256 /* of a product at a time, so that its columns stay in the nearest cache */

typedef struct { /* (batch, heads, sequence, size); strides in elements, 1 within a head */
    activation *data;
    long batch, head, row;
} Tensor;

typedef struct {
    Tensor query, key, value, out, out_gradient, query_gradient, key_gradient, value_gradient;
    float *log_sums; /* (batch, heads, sequence) */
    float scale;
    int32_t batch, heads, shared, sequence, key_size, value_size, threads;
} Call;

static long padded(long n, long to) { return (n + to - 1) / to * to; }

static activation *at(const Tensor *x, int b, int h, long row) { return x->data + b * x->batch + h * x->head + row * x->row; }

/* c (m, n) = or += a b: a's elements `down` and `along` apart, b in rows of `b_row`. m is a multiple of ROWS, n of TILE. */
static void multiply(long m, long n, long k, const float *a, long down, long along, const float *b, long b_row,
                     float *c, long c_row, int add) {
    for (long from = 0; from < k; from += DEPTH, add = 1) {
        long to = from + DEPTH < k ? from + DEPTH : k;
        for (long j = 0; j < n; j += TILE)
            for (long i = 0; i < m; i += ROWS) {
                vector sum[ROWS][2];
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < 2; v++)
                        sum[r][v] = add ? *(vector *)(c + (i + r) * c_row + j + v * LANES) : (vector){0};
                for (long p = from; p < to; p++) {
                    vector left = *(vector *)(b + p * b_row + j), right = *(vector *)(b + p * b_row + j + LANES);
                    for (int r = 0; r < ROWS; r++) {
                        float x = a[(i + r) * down + p * along];
                        sum[r][0] += x * left;
                        sum[r][1] += x * right;
                    }
                }
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < 2; v++) *(vector *)(c + (i + r) * c_row + j + v * LANES) = sum[r][v];
            }
    }
}

static inline vector larger(vector a, vector b) {
    integers first = a > b;
    return (vector)(((integers)a & first) | ((integers)b & ~first));
}

/* e^x, at most 1: 2^n times a polynomial of the rest (the terms of its series, up to 1e-7 of the value). */
static inline vector exponential(vector x) {
    x = -larger((vector){0}, -larger((vector){0} - 87.0f, x)); /* in this order NaN stays NaN */
    integers n = __builtin_convertvector(x * 1.44269504f - 0.5f, integers);
    vector whole = __builtin_convertvector(n, vector);
    vector r = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    vector p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (8.33333333e-3f + r * 1.38888889e-3f)))));
    return p * (vector)((n + 127) << 23);
}

/* Rows of one head as fp32, zeros beyond their end. */
static void copied(const activation *from, long row, long rows, long size, long rows_to, long size_to, float *to) {
    for (long i = 0; i < rows; i++) {
        for (long d = 0; d < size; d++) to[i * size_to + d] = READ(from[i * row + d]);
        for (long d = size; d < size_to; d++) to[i * size_to + d] = 0;
    }
    memset(to + rows * size_to, 0, 4 * (rows_to - rows) * size_to);
}

static void stored(const float *from, long from_row, float factor, activation *to, long row, long rows, long size) {
    for (long i = 0; i < rows; i++)
        for (long d = 0; d < size; d++) to[i * row + d] = WRITE(from[i * from_row + d] * factor);
}

typedef struct { /* of one thread */
    float *query, *keys, *key_columns, *values, *value_columns, *scores, *more, *rows, *keys_sum, *values_sum;
    long sequence, key, value, width;
    void *all;
} Space;

static Space space_of(const Call *call, int backward) {
    Space s = {.sequence = padded(call->sequence, BLOCK), .key = padded(call->key_size, TILE), .value = padded(call->value_size, TILE)};
    s.width = s.sequence + LANES; /* so that rows do not fall onto the same lines of the cache */
    long larger = s.key > s.value ? s.key : s.value;
    struct { float **of; long elements; } parts[] = {
        {&s.query, BLOCK * s.key}, {&s.key_columns, s.sequence * s.key}, {&s.scores, BLOCK * s.width}, {&s.rows, BLOCK * larger},
        {&s.values, s.sequence * s.value}, {&s.keys, s.sequence * s.key},
        {&s.value_columns, backward ? s.sequence * s.value : 0}, {&s.more, backward ? BLOCK * s.width : 0},
        {&s.keys_sum, backward ? s.sequence * s.key : 0}, {&s.values_sum, backward ? s.sequence * s.value : 0},
    };
    long total = 0, count = sizeof parts / sizeof *parts;
    for (int i = 0; i < count; i++) total += padded(parts[i].elements, LANES);
    float *next = s.all = aligned_alloc(64, 4 * padded(total, 16));
    for (int i = 0; next && i < count; i++) {
        *parts[i].of = next;
        next += padded(parts[i].elements, LANES);
    }
    return s;
}

static void attend(const Call *call, const Space *s, int b, int shared) {
    const long size = call->value_size, group = call->heads / call->shared;
    copied(at(&call->key, b, shared, 0), call->key.row, call->sequence, call->key_size, s->sequence, s->key, s->keys);
    transposed(s->keys, s->key, s->sequence, s->key, s->key_columns);
    copied(at(&call->value, b, shared, 0), call->value.row, call->sequence, size, s->sequence, s->value, s->values);
    for (int h = shared * group; h < (shared + 1) * group; h++)
        for (long first = 0; first < call->sequence; first += BLOCK) {
            long rows = call->sequence - first < BLOCK ? call->sequence - first : BLOCK, seen = first + BLOCK;
            copied(at(&call->query, b, h, first), call->query.row, rows, call->key_size, BLOCK, s->key, s->query);
            multiply(BLOCK, seen, s->key, s->query, s->key, 1, s->key_columns, s->sequence, s->scores, s->width, 0);
            for (long i = 0; i < rows; i++) {
                float *row = s->scores + i * s->width, most = -INFINITY, sum = 0;
                long end = first + i + 1; /* a query sees itself and what is before it */
                for (long j = end; j < padded(end, LANES); j++) row[j] = -INFINITY;
                vector sums = {0}, largest = *(vector *)row;
                for (long j = LANES; j < end; j += LANES) largest = larger(largest, *(vector *)(row + j));
                for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
                for (long j = 0; j < end; j += LANES) {
                    vector weights = exponential((*(vector *)(row + j) - most) * call->scale);
                    sums += weights;
                    *(vector *)(row + j) = weights;
                }
                for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
                memset(row + end, 0, 4 * (seen - end));
                call->log_sums[((long)b * call->heads + h) * call->sequence + first + i] = most * call->scale + logf(sum);
                for (long j = 0; j < seen; j += LANES) *(vector *)(row + j) /= sum;
            }
            for (long i = 0; i < BLOCK; i += ROWS) /* no further than these queries see */
                multiply(ROWS, s->value, first + i + ROWS, s->scores + i * s->width, s->width, 1, s->values, s->value, s->rows + i * s->value, s->value, 0);
            stored(s->rows, s->value, 1, at(&call->out, b, h, first), call->out.row, rows, size);
        }
}

static void derive(const Call *call, const Space *s, int b, int shared) {
    const long key = call->key_size, value = call->value_size, sequence = call->sequence, group = call->heads / call->shared;
    copied(at(&call->key, b, shared, 0), call->key.row, sequence, key, s->sequence, s->key, s->keys);
    transposed(s->keys, s->key, s->sequence, s->key, s->key_columns);
    copied(at(&call->value, b, shared, 0), call->value.row, sequence, value, s->sequence, s->value, s->values);
    transposed(s->values, s->value, s->sequence, s->value, s->value_columns);
    memset(s->keys_sum, 0, 4 * s->sequence * s->key);
    memset(s->values_sum, 0, 4 * s->sequence * s->value);
    for (int h = shared * group; h < (shared + 1) * group; h++)
        for (long first = 0; first < sequence; first += BLOCK) {
            long rows = sequence - first < BLOCK ? sequence - first : BLOCK, seen = first + BLOCK;
            const activation *out = at(&call->out, b, h, first), *gradient = at(&call->out_gradient, b, h, first);
            copied(at(&call->query, b, h, first), call->query.row, rows, key, BLOCK, s->key, s->query);
            copied(gradient, call->out_gradient.row, rows, value, BLOCK, s->value, s->rows);
            multiply(BLOCK, seen, s->key, s->query, s->key, 1, s->key_columns, s->sequence, s->scores, s->width, 0);
            multiply(BLOCK, seen, s->value, s->rows, s->value, 1, s->value_columns, s->sequence, s->more, s->width, 0);
            for (long i = 0; i < BLOCK; i++) {
                float *weights = s->scores + i * s->width, *of_scores = s->more + i * s->width;
                long end = i < rows ? first + i + 1 : 0;
                if (end) {
                    float log_sum = call->log_sums[((long)b * call->heads + h) * sequence + first + i], delta = 0;
                    for (long d = 0; d < value; d++) delta += READ(gradient[i * call->out_gradient.row + d]) * READ(out[i * call->out.row + d]);
                    for (long j = 0; j < end; j += LANES) {
                        vector *w = (vector *)(weights + j), *g = (vector *)(of_scores + j);
                        *w = exponential(*w * call->scale - log_sum);
                        *g = *w * (*g - delta);
                    }
                }
                memset(weights + end, 0, 4 * (seen - end));
                memset(of_scores + end, 0, 4 * (seen - end));
            }
            multiply(first, s->value, BLOCK, s->scores, 1, s->width, s->rows, s->value, s->values_sum, s->value, 1);
            multiply(first, s->key, BLOCK, s->more, 1, s->width, s->query, s->key, s->keys_sum, s->key, 1);
            for (long i = 0; i < BLOCK; i += ROWS) { /* the block's own keys: queries before them see nothing of them */
                long own = i * s->width + first + i, key_row = (first + i) * s->key, value_row = (first + i) * s->value;
                multiply(ROWS, s->value, BLOCK - i, s->scores + own, 1, s->width, s->rows + i * s->value, s->value, s->values_sum + value_row, s->value, 1);
                multiply(ROWS, s->key, BLOCK - i, s->more + own, 1, s->width, s->query + i * s->key, s->key, s->keys_sum + key_row, s->key, 1);
            }
            for (long i = 0; i < BLOCK; i += ROWS)
                multiply(ROWS, s->key, first + i + ROWS, s->more + i * s->width, s->width, 1, s->keys, s->key, s->rows + i * s->key, s->key, 0);
            stored(s->rows, s->key, call->scale, at(&call->query_gradient, b, h, first), call->query_gradient.row, rows, key);
        }
    stored(s->keys_sum, s->key, call->scale, at(&call->key_gradient, b, shared, 0), call->key_gradient.row, sequence, key);
    stored(s->values_sum, s->value, 1, at(&call->value_gradient, b, shared, 0), call->value_gradient.row, sequence, value);
}

/* 0, or 1 where there was no memory to work in. */
int causal(const Call *call, int backward) {
    int failed = 0;
#pragma omp parallel num_threads(call->threads) if (call->threads > 1)
    {
        Space space = space_of(call, backward);
        if (!space.all) failed = 1;
#pragma omp for schedule(dynamic)
        for (int task = 0; task < call->batch * call->shared; task++)
            if (space.all) (backward ? derive : attend)(call, &space, task / call->shared, task % call->shared);
        free(space.all);
    }
    return failed;
}
