/* Attention of a few new tokens over keys and values in pages, without gathering them, norms, and whole blocks.

   Compiled for one model: HEADS query heads over SHARED key/value heads, keys of KEY and values of VALUE elements, PAGE
   tokens a page, the formats STORE and ACTIVATION. A row of a part of the cache is (page x SHARED + head) x PAGE + place
   (`model/cached.py`, `Pages`). The softmax is taken page by page with a running maximum (arXiv 1805.02867). */

#include "product.c"

#define GROUP (HEADS / SHARED)

#if STORE == FP32
typedef float stored;
#define LOAD(x) (x)
#define KEEP(x) (x)
#elif STORE == BF16
typedef bf16 stored;
#define LOAD(x) widened(x)
#define KEEP(x) narrowed(x)
#elif STORE == INT8
typedef int8_t stored;
#define LOAD(x) ((float)(x))
#elif STORE == INT4 /* two to a byte, the first in the low bits, 8 added to each */
typedef uint8_t stored;
#define LOAD(x) (x)
#else
typedef uint8_t stored;
static float fp8_values[256]; /* of e4m3, filled by `prepare` */
#define LOAD(x) fp8_values[x]
#endif

#if STORE == INT4
#define WIDTH(size) (((size) + 1) / 2)
#define ROW(name, from, size)                       \
    float name[2 * WIDTH(size)];                    \
    for (int d = 0; d < WIDTH(size); d++) {         \
        name[2 * d] = ((from)[d] & 15) - 8;         \
        name[2 * d + 1] = ((from)[d] >> 4) - 8;     \
    }
#else
#define WIDTH(size) (size)
#define ROW(name, from, size) const stored *name = from
#endif

typedef struct { /* of one layer */
    stored *keys, *values;
    const float *key_scales, *value_scales; /* one for each row, of 8 and 4 bits */
    const float *slopes, *sinks;            /* one for each query head, or NULL */
    float scale, cap;                       /* cap 0: none */
    int32_t window;                         /* 0: none */
} Layer;

typedef struct { /* of one step */
    const int32_t *table;     /* (sequences, width): pages */
    const int32_t *sequence;  /* of each token */
    const int32_t *positions; /* of each token */
    int32_t tokens, width, threads;
} Step;

void prepare(const float *values) {
#if STORE == FP8
    for (int i = 0; i < 256; i++) fp8_values[i] = values[i];
#else
    (void)values;
#endif
}

static inline long row_of(const Step *step, int token, int place, int head) {
    long page = step->table[(long)step->sequence[token] * step->width + place / PAGE];
    return (page * SHARED + head) * PAGE + place % PAGE;
}

#if STORE == FP32 || STORE == BF16
/* Keys (tokens, SHARED, KEY) and values (tokens, SHARED, VALUE) to their places; strides in elements, of a token. */
void keep(const Layer *layer, const Step *step, const activation *key, long key_stride, const activation *value,
          long value_stride) {
    for (int n = 0; n < step->tokens; n++)
        for (int h = 0; h < SHARED; h++) {
            long row = row_of(step, n, step->positions[n], h);
            for (int d = 0; d < KEY; d++) layer->keys[row * KEY + d] = KEEP(READ(key[n * key_stride + h * KEY + d]));
            if (value)
                for (int d = 0; d < VALUE; d++)
                    layer->values[row * VALUE + d] = KEEP(READ(value[n * value_stride + h * VALUE + d]));
        }
}
#endif

static inline void fetch(const void *from, int bytes) {
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b);
}

/* Queries of the heads from `head` on that share keys, over the places [from, to) of the page at `row`; `back`: how far
   the first place of the page lies behind the query. */
static inline void attend_page(const Layer *layer, long row, int from, int to, int back, float q[][KEY],
                               float o[][VALUE], float *most, float *sum, int head) {
    float s[GROUP][PAGE];
    for (int t = from; t < to; t++) {
        ROW(k, layer->keys + (row + t) * WIDTH(KEY), KEY);
        for (int g = 0; g < GROUP; g++) {
            float dot = 0;
            for (int d = 0; d < KEY; d++) dot += q[g][d] * LOAD(k[d]);
            s[g][t] = dot;
        }
    }
    for (int g = 0; g < GROUP; g++) {
        float larger = most[g], total = 0;
        /* All places of the page, for whole vectors, one rule after the other. */
        for (int t = 0; layer->key_scales && t < PAGE; t++) s[g][t] *= layer->key_scales[row + t];
        for (int t = 0; layer->cap != 0 && t < PAGE; t++) s[g][t] = layer->cap * hyperbolic_tangent(s[g][t] / layer->cap);
        for (int t = 0; layer->slopes && t < PAGE; t++) s[g][t] -= layer->slopes[head + g] * (back - t);
        for (int t = 0; t < PAGE; t++) s[g][t] = t < from || t >= to ? -3e38f : s[g][t];
        for (int t = 0; t < PAGE; t++) larger = s[g][t] > larger ? s[g][t] : larger;
        float factor = exponential(most[g] - larger);
        for (int t = 0; t < PAGE; t++) {
            s[g][t] = exponential(s[g][t] - larger);
            total += s[g][t];
        }
        sum[g] = sum[g] * factor + total;
        most[g] = larger;
        for (int d = 0; d < VALUE; d++) o[g][d] *= factor;
        for (int t = 0; layer->value_scales && t < PAGE; t++) s[g][t] *= layer->value_scales[row + t];
    }
    for (int t = from; t < to; t++) {
        ROW(v, layer->values + (row + t) * WIDTH(VALUE_STRIDE), VALUE);
        float value[VALUE];
        for (int d = 0; d < VALUE; d++) value[d] = LOAD(v[d]);
        for (int g = 0; g < GROUP; g++)
            for (int d = 0; d < VALUE; d++) o[g][d] += s[g][t] * value[d];
    }
}

/* Of one token the heads from `head` to `end`. Those of a page lie together: pages outside, heads inside. */
static void attend_some(const Layer *layer, const Step *step, const activation *query, activation *out, int n, int head,
                        int end) {
    float q[HEADS][KEY], o[HEADS][VALUE], most[HEADS], sum[HEADS];
    int last = step->positions[n], first = 0;
    if (layer->window && last >= layer->window) first = last - layer->window + 1;
    for (int i = head * GROUP; i < end * GROUP; i++) {
        for (int d = 0; d < KEY; d++) q[i][d] = READ(query[i * KEY + d]) * layer->scale;
        for (int d = 0; d < VALUE; d++) o[i][d] = 0;
        most[i] = layer->sinks ? layer->sinks[i] : -3e38f;
        sum[i] = layer->sinks ? 1 : 0;
    }
    for (int start = first / PAGE * PAGE; start <= last; start += PAGE) {
        int from = first > start ? first - start : 0, to = last - start + 1 < PAGE ? last - start + 1 : PAGE;
        for (int h = head; h < end; h++) {
            long row = row_of(step, n, start, h), next = row + PAGE;
            if (h + 1 == end && start + PAGE <= last) next = row_of(step, n, start + PAGE, head);
            if (h + 1 < end || start + PAGE <= last) { /* pages lie anywhere: no processor guesses where the next is */
                fetch(layer->keys + next * WIDTH(KEY), PAGE * WIDTH(KEY) * sizeof(stored));
                fetch(layer->values + next * WIDTH(VALUE_STRIDE), PAGE * WIDTH(VALUE_STRIDE) * sizeof(stored));
            }
            attend_page(layer, row, from, to, last - start, q + h * GROUP, o + h * GROUP, most + h * GROUP,
                        sum + h * GROUP, h * GROUP);
        }
    }
    for (int i = head * GROUP; i < end * GROUP; i++)
        for (int d = 0; d < VALUE; d++) out[i * VALUE + d] = WRITE(o[i][d] / sum[i]);
}

/* The first `size` elements of `heads` heads of KEY elements, first half against second half, in place; `cosines` and
   `sines` (tokens, KEY) as `model/rotary.py` makes them for `rotate_fused`. */
void turn(activation *x, long stride, int heads, const activation *cosines, const activation *sines, int tokens,
          int size) {
    int half = size / 2;
    for (int n = 0; n < tokens; n++)
        for (int h = 0; h < heads; h++) {
            activation *row = x + n * stride + h * KEY;
            const activation *cos = cosines + (long)n * KEY, *sin = sines + (long)n * KEY;
            for (int d = 0; d < half; d++) {
                float a = READ(row[d]), b = READ(row[d + half]);
                row[d] = WRITE(a * READ(cos[d]) + b * READ(sin[d]));
                row[d + half] = WRITE(b * READ(cos[d + half]) + a * READ(sin[d + half]));
            }
        }
}

typedef struct { /* LayerNorm, or RMSNorm where it does not center; weight and bias may be NULL */
    const float *weight, *bias;
    float eps;
    int32_t centers;
} Norm;

/* Of `rows` rows of `size`. */
void norm(const Norm *by, const float *x, float *out, long rows, long size) {
    for (long n = 0; n < rows; n++, x += size, out += size) {
        float mean = 0, sum = 0;
        for (long d = 0; d < size; d++) mean += x[d];
        mean = by->centers ? mean / size : 0;
        for (long d = 0; d < size; d++) sum += (x[d] - mean) * (x[d] - mean);
        float factor = 1 / __builtin_sqrtf(sum / size + by->eps);
        for (long d = 0; d < size; d++) out[d] = (x[d] - mean) * factor;
        for (long d = 0; by->weight && d < size; d++) out[d] *= by->weight[d];
        for (long d = 0; by->bias && d < size; d++) out[d] += by->bias[d];
    }
}

/* Queries (tokens, HEADS, KEY) to (tokens, HEADS, VALUE); keys and values of the tokens are in their places. */
void attend(const Layer *layer, const Step *step, const activation *query, long query_stride, activation *out) {
    int parts = (2 * step->threads + step->tokens - 1) / step->tokens; /* of a token's heads, so that no thread waits */
    parts = step->threads < 2 ? 1 : parts < SHARED ? parts : SHARED;
#pragma omp parallel for num_threads(step->threads) if (step->threads > 1) schedule(dynamic)
    for (int i = 0; i < step->tokens * parts; i++) {
        int n = i / parts, part = i % parts;
        attend_some(layer, step, query + n * query_stride, out + (long)n * HEADS * VALUE, n, SHARED * part / parts,
                    SHARED * (part + 1) / parts);
    }
}

#if (STORE == FP32 || STORE == BF16) && KEY == VALUE && defined(WIDE)
typedef struct {
    const Layer *layer;
    Linear qkv, out, gate, up, down; /* no gate: its weight is NULL */
    Norm attention_norm, ffn_norm;
    float factor; /* of what a branch adds to the residual stream */
    int32_t hidden, activation, parallel; /* parallel: both branches read the block's input */
} Block;

/* A product of rows in fp32, which become what the weight multiplies in `codes`. */
static int multiply(const Linear *l, const float *x, const Result *to, const Step *step, void *codes, float *scales) {
    long rows = step->tokens, count = rows * l->inputs;
    if (l->format == BF16)
        for (long i = 0; i < count; i++) ((bf16 *)codes)[i] = narrowed(x[i]);
    if (l->format == INT8 || l->format == INT4) quantize(x, codes, scales, rows, l->inputs, l->format);
    return product(l, l->format == FP32 ? (const void *)x : codes, scales, to, rows, step->threads);
}

#if ACTIVATION == FP32
#define MULTIPLY(l, x, to) multiply(l, x, to, step, codes, scales)
#else /* of which the weights are too */
#define MULTIPLY(l, x, to) product(l, x, 0, to, rows, step->threads)
#endif

/* Tokens `x` (tokens, hidden), in place, through one block. `cosines`: NULL where nothing turns. `scratch`: for each
   token, 4 bytes for each element of hidden, qkv, out's inputs, down's inputs twice, the longest input, and one more.
   0, or 1 where there was no memory. */
int block(const Block *b, const Step *step, float *x, const activation *cosines, const activation *sines, int turned,
           float *scratch) {
    long rows = step->tokens, stride = (HEADS + 2 * SHARED) * KEY;
    float *read = scratch, *scales;
    activation *together = (activation *)(read + rows * b->hidden), *mixed = together + rows * stride;
    activation *gated = mixed + rows * HEADS * VALUE, *wide = gated + rows * b->down.inputs;
    scales = (float *)(wide + rows * b->down.inputs);
    void *codes = scales + rows;
    Result adds = {.sum = x, .factor = b->factor}, stores = {.is_bf16 = ACTIVATION == BF16};

    norm(&b->attention_norm, x, read, rows, b->hidden);
    stores.out = together;
    if (multiply(&b->qkv, read, &stores, step, codes, scales)) return 1;
    if (cosines) turn(together, stride, HEADS + SHARED, cosines, sines, rows, turned);
    keep(b->layer, step, together + HEADS * KEY, stride, together + (HEADS + SHARED) * KEY, stride);
    attend(b->layer, step, together, stride, mixed);
    if (b->parallel) norm(&b->ffn_norm, x, read, rows, b->hidden);
    if (MULTIPLY(&b->out, mixed, &adds)) return 1;

    if (!b->parallel) norm(&b->ffn_norm, x, read, rows, b->hidden);
    stores.out = gated, stores.activation = b->activation;
    if (multiply(b->gate.weight ? &b->gate : &b->up, read, &stores, step, codes, scales)) return 1;
    if (b->gate.weight) {
        stores.out = wide, stores.times = gated, stores.activation = NONE;
        if (multiply(&b->up, read, &stores, step, codes, scales)) return 1;
    }
    return MULTIPLY(&b->down, (b->gate.weight ? wide : gated), &adds);
}
#endif
