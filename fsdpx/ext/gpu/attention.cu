// Attention in bfloat16 that never stores its scores (FlashAttention-2, Dao 2023). Products use the matrix units of
// NVIDIA GPUs (Ampere or later), and sums are computed in float32. HEAD is the number of features of a head, a multiple
// of 16 up to 128.
//
// A block owns OWN rows, 16 per warp, and iterates over tiles of WALK rows of the other operand. One tile is copied to
// shared memory while the previous one is used. Nothing is added atomically: gradients of queries, and those of keys and
// values, are computed in two separate kernels.

typedef unsigned short real;  // the bits of a bfloat16
typedef long long number;

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_##name) fsdpx_##name
#define WARPS 4
// Number of blocks that share a multiprocessor, which limits the registers of each thread.
#define BLOCKS_flash (HEAD > 64 ? 2 : 3)
#define BLOCKS_flash_sums 8
#define BLOCKS_flash_queries (HEAD > 64 ? 2 : 3)
#define BLOCKS_flash_keys 2
#define OWN (16 * WARPS)
#define WALK (HEAD > 64 ? 32 : 64)
#define PITCH (HEAD + 8)      // stride of rows in shared memory, such that eight rows are in different banks
#define STEPS (HEAD / 16)     // a product adds 16 numbers at a time
#define PACKS (HEAD / 8)      // 16 bytes each
#define ACROSS (WALK / 8)     // number of 16 x 8 pieces of a warp's scores
#define TILE (WALK * PITCH)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define NONE (-INFINITY)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// -- the matrix units -----------------------------------------------------------------------------------------------------

#ifndef ON_THE_HOST  // tests on the host define these functions
// c (16 x 8) += a (16 x 16) b (16 x 8), in the registers of a warp.
__device__ inline void mma(float* c, const unsigned* a, const unsigned* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 matrices from shared memory; each lane passes the address of one row.
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

// Begins to copy 16 bytes to shared memory, or writes zeros if not `there`; `arrive` waits for all copies that this
// thread began.
__device__ inline void begin_copy(real* to, const real* from, bool there) {
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0));
}
__device__ inline void arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// The number to subtract from scores, in units of log 2, before exponentials are taken. It is infinite if a row attends to
// no key, so that its probabilities are 0.
__device__ inline float base_of(float lse) { return lse == NONE ? INFINITY : lse * LOG2E; }

__device__ inline float wide(unsigned bits) { return __uint_as_float(bits << 16); }

// -- tiles ----------------------------------------------------------------------------------------------------------------

// Begins to copy rows [first, first + rows) of a matrix into a tile; rows from `last` on are zeros.
__device__ inline void fill(real* tile, const real* matrix, number pitch, int first, int last, int rows) {
#pragma unroll
    for (int i = threadIdx.x; i < rows * PACKS; i += 32 * WARPS) {
        int row = i / PACKS, column = i % PACKS * 8;
        bool there = first + row < last;
        begin_copy(tile + row * PITCH + column, matrix + (there ? first + row : 0) * pitch + column, there);
    }
}

// Loads the rows of a matrix that this block owns, as the left operand of products of this warp.
__device__ inline void own_rows(unsigned (*out)[4], real* tiles, const real* matrix, number pitch, int first, int last) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    fill(tiles, matrix, pitch, first, last, OWN);
    arrive();
    __syncthreads();
    for (int step = 0; step < STEPS; step++)
        matrices<false>(out[step], tiles + (warp * 16 + lane % 16) * PITCH + step * 16 + lane / 16 * 8);
    __syncthreads();
}

// c = a tile^T, (16, WALK).
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

// c += p tile, for p (16, WALK), which is rounded, and tile (WALK, HEAD).
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

// Writes the rows of this warp to memory, the upper and lower half each multiplied by a factor.
__device__ inline void write(real* matrix, number pitch, int first, int last, const float (*c)[4], float upper, float lower) {
    int lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        int column = i * 8 + lane % 4 * 2;
        if (row < last) *(unsigned*)(matrix + row * pitch + column) = rounded(c[i][0] * upper, c[i][1] * upper);
        if (row + 8 < last) *(unsigned*)(matrix + (row + 8) * pitch + column) = rounded(c[i][2] * lower, c[i][3] * lower);
    }
}

// Reductions over the four threads that hold a row of a piece.
__device__ inline float largest(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
}
__device__ inline float total(float v) {
    v += __shfl_xor_sync(0xffffffff, v, 1);
    return v + __shfl_xor_sync(0xffffffff, v, 2);
}

// -- masks --------------------------------------------------------------------------------------------------------------

struct Mask {
    int t, n, window;  // queries, keys; 0: no window
    bool causal;
    const number* segments;

    __device__ bool attends(int at, int i) const {
        return at < t && i < n && (!causal || i <= at) && (!window || i > at - window) && (!segments || segments[i] == segments[at]);
    }
    // Whether all `queries` queries from `at` on attend to all `keys` keys from `i` on.
    __device__ bool whole(int at, int queries, int i, int keys) const {
        return !segments && at + queries <= t && i + keys <= n && (!causal || i + keys - 1 <= at) && (!window || i > at + queries - 1 - window);
    }
    // The range of keys to which queries of a block attend, and the range of queries that attend to keys of a block.
    __device__ int first_key(int at) const { return window && at >= window ? (at - window + 1) / WALK * WALK : 0; }
    __device__ int last_key(int at) const { return causal && at + OWN < n ? at + OWN : n; }
    __device__ int first_query(int i) const { return causal ? i / WALK * WALK : 0; }
    __device__ int last_query(int i) const { return window && i + OWN - 1 + window < t ? i + OWN - 1 + window : t; }
};

#define VIEW(x) real *x, number x##_sample, number x##_head, number x##_row
#define PART(x, sample, head) (x + (sample) * x##_sample + (head) * x##_head)
#define SHAPE number heads, number shared, number t, number n, float scale, int causal, number window, const number *segments
#define MASK {(int)t, (int)n, (int)window, causal != 0, segments ? segments + sample * t : 0}

// -- forward ------------------------------------------------------------------------------------------------------------

KERNEL(flash)(VIEW(q), VIEW(k), VIEW(v), VIEW(o), float* lse, SHAPE) {
    __shared__ __align__(16) real tiles[4 * TILE];
    int blocks = (t + OWN - 1) / OWN, begin = (blocks - 1 - blockIdx.x % blocks) * OWN;  // the longest walks first
    number pair = blockIdx.x / blocks, sample = pair / heads, head = pair % heads, other = head / (heads / shared);
    Mask mask = MASK;
    unsigned queries[STEPS][4];
    float out[PACKS][4] = {}, scores[ACROSS][4], top[2] = {NONE, NONE}, sum[2] = {0, 0}, factor = scale * LOG2E;
    int lane = threadIdx.x % 32, at = begin + threadIdx.x / 32 * 16 + lane / 4;
    k = PART(k, sample, other), v = PART(v, sample, other);

    own_rows(queries, tiles, PART(q, sample, head), q_row, begin, t);
    int i = mask.first_key(begin), last = mask.last_key(begin), turn = 0;
    fill(tiles, k, k_row, i, n, WALK);
    fill(tiles + TILE, v, v_row, i, n, WALK);
    for (; i < last; i += WALK, turn ^= 1) {
        real *keys = tiles + 2 * TILE * turn, *values = keys + TILE, *next = tiles + 2 * TILE * (turn ^ 1);
        arrive();
        __syncthreads();
        if (i + WALK < last) {
            fill(next, k, k_row, i + WALK, n, WALK);
            fill(next + TILE, v, v_row, i + WALK, n, WALK);
        }
        across(scores, queries, keys);
        if (!mask.whole(begin, OWN, i, WALK))
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!mask.attends(at + e / 2 * 8, i + j * 8 + lane % 4 * 2 + e % 2)) scores[j][e] = NONE;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = top[half];
#pragma unroll
            for (int j = 0; j < ACROSS; j++) most = fmaxf(most, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
            most = largest(most);
            float base = most == NONE ? 0 : most * factor, shrink = exp2f(top[half] * factor - base);
            top[half] = most;
            sum[half] *= shrink;
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) sum[half] += scores[j][e] = exp2f(scores[j][e] * factor - base);
#pragma unroll
            for (int j = 0; j < PACKS; j++) out[j][2 * half] *= shrink, out[j][2 * half + 1] *= shrink;
        }
        along(out, scores, values);
    }
    for (int half = 0; half < 2; half++) {
        sum[half] = total(sum[half]);
        if (lane % 4 == 0 && at + 8 * half < t) lse[pair * t + at + 8 * half] = (top[half] * factor + log2f(sum[half])) * LN2;
    }
    write(PART(o, sample, head), o_row, begin, t, out, sum[0] > 0 ? 1 / sum[0] : 0, sum[1] > 0 ? 1 / sum[1] : 0);
}

// -- backward -------------------------------------------------------------------------------------------------------------

// The sum of do o over the features of each row, with a thread for each pack of a row.
KERNEL(flash_sums)(VIEW(o), VIEW(g), float* sums, number heads, number t, number places) {
    number place = blockIdx.x * (number)(WARPS * 32 / 16) + threadIdx.x / 16, pair = place / t, row = place % t;
    int pack = threadIdx.x % 16;
    float sum = 0;
    if (place < places && pack < PACKS) {
        uint4 one = *(const uint4*)(PART(o, pair / heads, pair % heads) + row * o_row + pack * 8);
        uint4 two = *(const uint4*)(PART(g, pair / heads, pair % heads) + row * g_row + pack * 8);
        const unsigned a[4] = {one.x, one.y, one.z, one.w}, b[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
        for (int i = 0; i < 4; i++) sum += wide(a[i]) * wide(b[i]) + wide(a[i] >> 16) * wide(b[i] >> 16);
    }
    for (int step = 8; step; step >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (place < places && pack == 0) sums[place] = sum;
}

KERNEL(flash_queries)(VIEW(q), VIEW(k), VIEW(v), VIEW(g), VIEW(dq), const float* lse, const float* sums, SHAPE) {
    __shared__ __align__(16) real tiles[4 * TILE];
    int blocks = (t + OWN - 1) / OWN, begin = (blocks - 1 - blockIdx.x % blocks) * OWN;
    number pair = blockIdx.x / blocks, sample = pair / heads, head = pair % heads, other = head / (heads / shared);
    Mask mask = MASK;
    unsigned queries[STEPS][4], slopes[STEPS][4];
    float out[PACKS][4] = {}, p[ACROSS][4], dp[ACROSS][4], all[2], sum[2], factor = scale * LOG2E;
    int lane = threadIdx.x % 32, at = begin + threadIdx.x / 32 * 16 + lane / 4;
    k = PART(k, sample, other), v = PART(v, sample, other);

    own_rows(queries, tiles, PART(q, sample, head), q_row, begin, t);
    own_rows(slopes, tiles, PART(g, sample, head), g_row, begin, t);
    for (int half = 0; half < 2; half++) {
        bool there = at + 8 * half < t;
        all[half] = there ? base_of(lse[pair * t + at + 8 * half]) : 0;
        sum[half] = there ? sums[pair * t + at + 8 * half] : 0;
    }
    int i = mask.first_key(begin), last = mask.last_key(begin), turn = 0;
    fill(tiles, k, k_row, i, n, WALK);
    fill(tiles + TILE, v, v_row, i, n, WALK);
    for (; i < last; i += WALK, turn ^= 1) {
        real *keys = tiles + 2 * TILE * turn, *values = keys + TILE, *next = tiles + 2 * TILE * (turn ^ 1);
        arrive();
        __syncthreads();
        if (i + WALK < last) {
            fill(next, k, k_row, i + WALK, n, WALK);
            fill(next + TILE, v, v_row, i + WALK, n, WALK);
        }
        across(p, queries, keys);
        across(dp, slopes, values);
        if (!mask.whole(begin, OWN, i, WALK))
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!mask.attends(at + e / 2 * 8, i + j * 8 + lane % 4 * 2 + e % 2)) p[j][e] = NONE;
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dp[j][e] = exp2f(p[j][e] * factor - all[e / 2]) * (dp[j][e] - sum[e / 2]);
        along(out, dp, keys);
    }
    write(PART(dq, sample, head), dq_row, begin, t, out, scale, scale);
}

KERNEL(flash_keys)(VIEW(q), VIEW(k), VIEW(v), VIEW(g), VIEW(dk), VIEW(dv), const float* lse, const float* sums, SHAPE) {
    __shared__ __align__(16) real tiles[4 * TILE];
    __shared__ float rows[2][2][WALK];  // lse and sums of the tiles
    int blocks = (n + OWN - 1) / OWN, begin = blockIdx.x % blocks * OWN;
    number pair = blockIdx.x / blocks, sample = pair / shared, other = pair % shared, group = heads / shared;
    Mask mask = MASK;
    unsigned keys[STEPS][4], values[STEPS][4];
    float into_k[PACKS][4] = {}, into_v[PACKS][4] = {}, p[ACROSS][4], dp[ACROSS][4], factor = scale * LOG2E;
    int lane = threadIdx.x % 32, own = begin + threadIdx.x / 32 * 16 + lane / 4;
    int first = mask.first_query(begin), last = mask.last_query(begin), walks = last > first ? (last - first + WALK - 1) / WALK : 0;

    own_rows(keys, tiles, PART(k, sample, other), k_row, begin, n);
    own_rows(values, tiles, PART(v, sample, other), v_row, begin, n);
    auto load = [&](int walk) {  // loads the tiles of one head after another
        number head = other * group + walk / walks, place = (sample * heads + head) * t;
        int at = first + walk % walks * WALK;
        real* into = tiles + 2 * TILE * (walk & 1);
        fill(into, PART(q, sample, head), q_row, at, t, WALK);
        fill(into + TILE, PART(g, sample, head), g_row, at, t, WALK);
        for (int i = threadIdx.x; i < WALK; i += 32 * WARPS) {
            bool there = at + i < t;
            rows[walk & 1][0][i] = there ? base_of(lse[place + at + i]) : 0;
            rows[walk & 1][1][i] = there ? sums[place + at + i] : 0;
        }
    };
    if (walks) load(0);
    for (int walk = 0; walk < walks * group; walk++) {
        real *queries = tiles + 2 * TILE * (walk & 1), *slopes = queries + TILE;
        const float *all = rows[walk & 1][0], *sum = rows[walk & 1][1];
        int at = first + walk % walks * WALK;
        arrive();
        __syncthreads();
        if (walk + 1 < walks * group) load(walk + 1);
        across(p, keys, queries);
        across(dp, values, slopes);
        if (!mask.whole(at, WALK, begin, OWN))
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!mask.attends(at + j * 8 + lane % 4 * 2 + e % 2, own + e / 2 * 8)) p[j][e] = NONE;
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int column = j * 8 + lane % 4 * 2 + e % 2;
                p[j][e] = exp2f(p[j][e] * factor - all[column]);
                dp[j][e] = p[j][e] * (dp[j][e] - sum[column]);
            }
        along(into_v, p, slopes);
        along(into_k, dp, queries);
    }
    write(PART(dk, sample, other), dk_row, begin, n, into_k, scale, scale);
    write(PART(dv, sample, other), dv_row, begin, n, into_v, 1, 1);
}
