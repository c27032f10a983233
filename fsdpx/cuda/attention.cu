// Attention in bfloat16 that never has its scores in memory (FlashAttention-2, Dao 2023): products by the matrix units of
// NVIDIA's GPUs since Ampere, sums in float32. HEAD is the number of features of a head, a multiple of 16, at most 128.
//
// A block owns OWN rows, 16 for each warp, and walks over tiles of WALK rows of the other side, which it keeps in shared
// memory. Nothing is added atomically: gradients of queries and those of keys and values are two walks.

typedef unsigned short real;  // the bits of a bfloat16
typedef long long number;

#define KERNEL(name) extern "C" __global__ void fsdpx_##name
#define WARPS 4
#define OWN (16 * WARPS)
#define WALK (HEAD > 64 ? 32 : 64)
#define PITCH (HEAD + 8)      // of a row in shared memory: eight rows lie in different banks
#define STEPS (HEAD / 16)     // a product adds 16 numbers at a time
#define PACKS (HEAD / 8)      // 16 bytes each
#define ACROSS (WALK / 8)     // pieces of 16 x 8 in a warp's scores
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define NONE (-INFINITY)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// -- the matrix units -----------------------------------------------------------------------------------------------------

#ifndef ON_THE_HOST  // tests have their own
// c (16 x 8) += a (16 x 16) b (16 x 8), as the registers of a warp.
__device__ inline void mma(float* c, const unsigned* a, const unsigned* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 x 8 from shared memory: each lane says where one row begins.
template <bool TURNED> __device__ inline void matrices(unsigned* out, const real* row) {
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at));
}

__device__ inline unsigned rounded(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#endif

__device__ inline float wide(unsigned bits) { return __uint_as_float(bits << 16); }

// -- tiles ----------------------------------------------------------------------------------------------------------------

// Rows first to first + rows of a matrix into a tile; beyond `last` there are zeros.
__device__ inline void fill(real* tile, const real* matrix, number pitch, number first, number last, int rows) {
    for (int i = threadIdx.x; i < rows * PACKS; i += 32 * WARPS) {
        int row = i / PACKS, column = i % PACKS * 8;
        uint4 pack = {0, 0, 0, 0};
        if (first + row < last) pack = *(const uint4*)(matrix + (first + row) * pitch + column);
        *(uint4*)(tile + row * PITCH + column) = pack;
    }
}

// The 16 rows of this warp from a tile, as the left side of products.
__device__ inline void own_rows(unsigned (*out)[4], const real* tile) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int step = 0; step < STEPS; step++)
        matrices<false>(out[step], tile + (warp * 16 + lane % 16) * PITCH + step * 16 + lane / 16 * 8);
}

// c = a tile^T: (16, WALK).
__device__ inline void across(float (*c)[4], const unsigned (*a)[4], const real* tile) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ACROSS; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < ACROSS; i += 2) {
            unsigned b[4];
            matrices<false>(b, tile + (i * 8 + lane / 16 * 8 + lane % 8) * PITCH + step * 16 + lane / 8 % 2 * 8);
            mma(c[i], a[step], b);
            mma(c[i + 1], a[step], b + 2);
        }
}

// c += p tile: (16, WALK) of numbers that are rounded and (WALK, HEAD).
__device__ inline void along(float (*c)[4], const float (*p)[4], const real* tile) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < ACROSS / 2; step++) {
        const float *left = p[2 * step], *right = p[2 * step + 1];
        unsigned a[4] = {rounded(left[0], left[1]), rounded(left[2], left[3]), rounded(right[0], right[1]), rounded(right[2], right[3])};
#pragma unroll
        for (int i = 0; i < PACKS; i += 2) {
            unsigned b[4];
            matrices<true>(b, tile + (step * 16 + lane / 8 % 2 * 8 + lane % 8) * PITCH + i * 8 + lane / 16 * 8);
            mma(c[i], a, b);
            mma(c[i + 1], a, b + 2);
        }
    }
}

// The rows of this warp, times a factor for each half of them, to memory.
__device__ inline void write(real* matrix, number pitch, number first, number last, const float (*c)[4], float upper, float lower) {
    int lane = threadIdx.x % 32;
    number row = first + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        int column = i * 8 + lane % 4 * 2;
        if (row < last) *(unsigned*)(matrix + row * pitch + column) = rounded(c[i][0] * upper, c[i][1] * upper);
        if (row + 8 < last) *(unsigned*)(matrix + (row + 8) * pitch + column) = rounded(c[i][2] * lower, c[i][3] * lower);
    }
}

// Over the four threads that have a row of a piece.
__device__ inline float largest(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
}
__device__ inline float total(float v) {
    v += __shfl_xor_sync(0xffffffff, v, 1);
    return v + __shfl_xor_sync(0xffffffff, v, 2);
}

// -- who attends to whom ----------------------------------------------------------------------------------------------------

struct Mask {
    number t, n, window;  // queries, keys; 0: no window
    int causal;
    const number* segments;

    __device__ bool attends(number at, number i) const {
        return at < t && i < n && (!causal || i <= at) && (!window || i > at - window) && (!segments || segments[i] == segments[at]);
    }
    // Whether all queries from `at` attend to all keys from `i` on, so far as the two tiles reach.
    __device__ bool whole(number at, int queries, number i, int keys) const {
        return !segments && at + queries <= t && i + keys <= n && (!causal || i + keys - 1 <= at) && (!window || i > at + queries - 1 - window);
    }
    // The keys that some query of a tile attends to, and the queries that attend to some key of one.
    __device__ number first_key(number at) const { return window && at >= window ? (at - window + 1) / WALK * WALK : 0; }
    __device__ number last_key(number at) const { return causal && at + OWN < n ? at + OWN : n; }
    __device__ number first_query(number i) const { return causal ? i / WALK * WALK : 0; }
    __device__ number last_query(number i) const { return window && i + OWN - 1 + window < t ? i + OWN - 1 + window : t; }
};

#define VIEW(x) real *x, number x##_sample, number x##_head, number x##_row
#define PART(x, sample, head) (x + (sample) * x##_sample + (head) * x##_head)
#define SHAPE number heads, number shared, number t, number n, float scale, int causal, number window, const number *segments
#define MASK {t, n, window, causal, segments ? segments + sample * t : 0}

// -- forward ------------------------------------------------------------------------------------------------------------

KERNEL(flash)(VIEW(q), VIEW(k), VIEW(v), VIEW(o), float* lse, SHAPE) {
    __shared__ __align__(16) real tiles[2 * WALK * PITCH];
    real *keys = tiles, *values = tiles + WALK * PITCH;
    number blocks = (t + OWN - 1) / OWN, begin = (blocks - 1 - blockIdx.x % blocks) * OWN;  // the longest walks first
    number pair = blockIdx.x / blocks, sample = pair / heads, head = pair % heads, other = head / (heads / shared);
    Mask mask = MASK;
    unsigned queries[STEPS][4];
    float out[PACKS][4] = {}, scores[ACROSS][4], top[2] = {NONE, NONE}, sum[2] = {0, 0}, factor = scale * LOG2E;
    int lane = threadIdx.x % 32;
    number at = begin + threadIdx.x / 32 * 16 + lane / 4;

    fill(tiles, PART(q, sample, head), q_row, begin, t, OWN);
    __syncthreads();
    own_rows(queries, tiles);
    for (number i = mask.first_key(begin), last = mask.last_key(begin); i < last; i += WALK) {
        __syncthreads();
        fill(keys, PART(k, sample, other), k_row, i, n, WALK);
        fill(values, PART(v, sample, other), v_row, i, n, WALK);
        __syncthreads();
        across(scores, queries, keys);
        bool whole = mask.whole(begin, OWN, i, WALK);
        float most[2] = {top[0], top[1]};
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                bool seen = whole || mask.attends(at + e / 2 * 8, i + j * 8 + lane % 4 * 2 + e % 2);
                scores[j][e] = seen ? scores[j][e] * factor : NONE;
                most[e / 2] = fmaxf(most[e / 2], scores[j][e]);
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            most[half] = largest(most[half]);
            float base = most[half] == NONE ? 0 : most[half], shrink = exp2f(top[half] - base);
            top[half] = most[half];
            sum[half] *= shrink;
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) sum[half] += scores[j][e] = exp2f(scores[j][e] - base);
#pragma unroll
            for (int j = 0; j < PACKS; j++) out[j][2 * half] *= shrink, out[j][2 * half + 1] *= shrink;
        }
        along(out, scores, values);
    }
    for (int half = 0; half < 2; half++) {
        sum[half] = total(sum[half]);
        if (lane % 4 == 0 && at + 8 * half < t) lse[pair * t + at + 8 * half] = (top[half] + log2f(sum[half])) * LN2;
    }
    write(PART(o, sample, head), o_row, begin, t, out, sum[0] > 0 ? 1 / sum[0] : 0, sum[1] > 0 ? 1 / sum[1] : 0);
}

// -- backward -------------------------------------------------------------------------------------------------------------

// The sum of do o over the features of each place: a warp for each.
KERNEL(flash_sums)(VIEW(o), VIEW(g), float* sums, number heads, number t, number places) {
    number place = blockIdx.x * (number)WARPS + threadIdx.x / 32, pair = place / t, row = place % t;
    float sum = 0;
    if (place < places) {
        const real* one = PART(o, pair / heads, pair % heads) + row * o_row;
        const real* two = PART(g, pair / heads, pair % heads) + row * g_row;
        for (int i = threadIdx.x % 32; i < HEAD; i += 32) sum += wide(one[i]) * wide(two[i]);
    }
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (place < places && threadIdx.x % 32 == 0) sums[place] = sum;
}

// Probabilities from scores, and from the gradient of probabilities that of scores: with p and dp in, ds is in dp.
__device__ inline void slope(float& p, float& dp, bool seen, float factor, float scale, float lse, float sum) {
    p = seen ? exp2f(p * factor - lse * LOG2E) : 0;
    dp = p * (dp - sum) * scale;
}

KERNEL(flash_queries)(VIEW(q), VIEW(k), VIEW(v), VIEW(g), VIEW(dq), const float* lse, const float* sums, SHAPE) {
    __shared__ __align__(16) real tiles[2 * WALK * PITCH];
    real *keys = tiles, *values = tiles + WALK * PITCH;
    number blocks = (t + OWN - 1) / OWN, begin = (blocks - 1 - blockIdx.x % blocks) * OWN;
    number pair = blockIdx.x / blocks, sample = pair / heads, head = pair % heads, other = head / (heads / shared);
    Mask mask = MASK;
    unsigned queries[STEPS][4], slopes[STEPS][4];
    float out[PACKS][4] = {}, p[ACROSS][4], dp[ACROSS][4], all[2], sum[2];
    int lane = threadIdx.x % 32;
    number at = begin + threadIdx.x / 32 * 16 + lane / 4;

    fill(tiles, PART(q, sample, head), q_row, begin, t, OWN);
    __syncthreads();
    own_rows(queries, tiles);
    __syncthreads();
    fill(tiles, PART(g, sample, head), g_row, begin, t, OWN);
    __syncthreads();
    own_rows(slopes, tiles);
    for (int half = 0; half < 2; half++) {
        bool there = at + 8 * half < t;
        all[half] = there ? lse[pair * t + at + 8 * half] : 0;
        sum[half] = there ? sums[pair * t + at + 8 * half] : 0;
    }
    for (number i = mask.first_key(begin), last = mask.last_key(begin); i < last; i += WALK) {
        __syncthreads();
        fill(keys, PART(k, sample, other), k_row, i, n, WALK);
        fill(values, PART(v, sample, other), v_row, i, n, WALK);
        __syncthreads();
        across(p, queries, keys);
        across(dp, slopes, values);
        bool whole = mask.whole(begin, OWN, i, WALK);
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                bool seen = whole || mask.attends(at + e / 2 * 8, i + j * 8 + lane % 4 * 2 + e % 2);
                slope(p[j][e], dp[j][e], seen, scale * LOG2E, scale, all[e / 2], sum[e / 2]);
            }
        along(out, dp, keys);
    }
    write(PART(dq, sample, head), dq_row, begin, t, out, 1, 1);
}

KERNEL(flash_keys)(VIEW(q), VIEW(k), VIEW(v), VIEW(g), VIEW(dk), VIEW(dv), const float* lse, const float* sums, SHAPE) {
    __shared__ __align__(16) real tiles[2 * WALK * PITCH];
    __shared__ float all[WALK], sum[WALK];
    real *queries = tiles, *slopes = tiles + WALK * PITCH;
    number blocks = (n + OWN - 1) / OWN, begin = blockIdx.x % blocks * OWN;
    number pair = blockIdx.x / blocks, sample = pair / shared, other = pair % shared, group = heads / shared;
    Mask mask = MASK;
    unsigned keys[STEPS][4], values[STEPS][4];
    float into_k[PACKS][4] = {}, into_v[PACKS][4] = {}, p[ACROSS][4], dp[ACROSS][4];
    int lane = threadIdx.x % 32;
    number own = begin + threadIdx.x / 32 * 16 + lane / 4;

    fill(tiles, PART(k, sample, other), k_row, begin, n, OWN);
    __syncthreads();
    own_rows(keys, tiles);
    __syncthreads();
    fill(tiles, PART(v, sample, other), v_row, begin, n, OWN);
    __syncthreads();
    own_rows(values, tiles);
    for (number head = other * group; head < (other + 1) * group; head++)
        for (number at = mask.first_query(begin), last = mask.last_query(begin); at < last; at += WALK) {
            __syncthreads();
            fill(queries, PART(q, sample, head), q_row, at, t, WALK);
            fill(slopes, PART(g, sample, head), g_row, at, t, WALK);
            for (int i = threadIdx.x; i < WALK; i += 32 * WARPS) {
                bool there = at + i < t;
                all[i] = there ? lse[(sample * heads + head) * t + at + i] : 0;
                sum[i] = there ? sums[(sample * heads + head) * t + at + i] : 0;
            }
            __syncthreads();
            across(p, keys, queries);
            across(dp, values, slopes);
            bool whole = mask.whole(at, WALK, begin, OWN);
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int column = j * 8 + lane % 4 * 2 + e % 2;
                    bool seen = whole || mask.attends(at + column, own + e / 2 * 8);
                    slope(p[j][e], dp[j][e], seen, scale * LOG2E, scale, all[column], sum[column]);
                }
            along(into_v, p, slopes);
            along(into_k, dp, queries);
        }
    write(PART(dk, sample, other), dk_row, begin, n, into_k, 1, 1);
    write(PART(dv, sample, other), dv_row, begin, n, into_v, 1, 1);
}
