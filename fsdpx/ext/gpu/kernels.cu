// Kernels for operations that cuBLAS lacks, compiled once for each format: KIND is 64 (double), 32 (float) or 16 (bits of
// bfloat16, computed in float). Sums are computed in `wide`, in an order that depends only on shapes and block sizes:
// nothing is added atomically. Blocks have a multiple of 32 threads. Kernels over rows run one block per row. Threads
// read and write 16 bytes (a pack) at a time if the array begins at a multiple of 16 bytes.

#if KIND == 64
typedef double real;
typedef double wide;
#elif KIND == 32
typedef float real;
typedef float wide;
#else
typedef unsigned short real;
typedef float wide;
#endif
typedef long long number;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define KERNEL(name) extern "C" __global__ void fsdpx_##name
#define EACH(i, n) for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < (n); i += gridDim.x * (number)blockDim.x)
#define ALONG(i, n) for (number i = threadIdx.x; i < (n); i += blockDim.x)
#define LANES (16 / sizeof(real))
// Loop over the packs of n elements; i is the index of the first element of a pack.
#define PACKS(i, n) for (number i = (blockIdx.x * (number)blockDim.x + threadIdx.x) * LANES; i < (n); i += gridDim.x * (number)blockDim.x * LANES)
#define PACKS_ALONG(i, n) for (number i = threadIdx.x * LANES; i < (n); i += blockDim.x * LANES)
#define LANE(k) for (int k = 0; k < LANES; k++)

// -- formats ----------------------------------------------------------------------------------------------------------

__device__ inline double get(const double* x, number i) { return x[i]; }
__device__ inline float get(const float* x, number i) { return x[i]; }
__device__ inline float get(const unsigned short* x, number i) { return __uint_as_float((unsigned)x[i] << 16); }

__device__ inline void put(double* x, number i, double v) { x[i] = v; }
__device__ inline void put(float* x, number i, float v) { x[i] = v; }
__device__ inline void put(unsigned short* x, number i, float v) {  // rounds to nearest, ties to even
    unsigned bits = __float_as_uint(v);
    x[i] = v != v ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// The elements of one pack, in `wide`. Elements beyond n are read as 0, and are not written.
struct __align__(16) Bits { real at[LANES]; };
struct Pack {
    wide at[LANES];
    __device__ Pack() {}
    __device__ Pack(const real* x, number i, number n) {
        if (i + LANES <= n && (size_t)(x + i) % 16 == 0) {
            Bits bits = *(const Bits*)(x + i);
            LANE(k) at[k] = get(bits.at, k);
        } else
            LANE(k) at[k] = i + k < n ? get(x, i + k) : 0;
    }
    __device__ void write(real* x, number i, number n) const {
        if (i + LANES <= n && (size_t)(x + i) % 16 == 0) {
            Bits bits;
            LANE(k) put(bits.at, k, at[k]);
            *(Bits*)(x + i) = bits;
        } else
            LANE(k) if (i + k < n) put(x, i + k, at[k]);
    }
    __device__ void round() {
        Bits bits;
        LANE(k) put(bits.at, k, at[k]);
        LANE(k) at[k] = get(bits.at, k);
    }
};

// The elements of `bias`, repeated for every row of `features` elements, that belong to the pack at element i.
__device__ inline Pack of_features(const real* bias, number i, number features) {
    Pack found;
    number first = i % features;
    if (first + LANES <= features) return Pack(bias, first, features);
    LANE(k) found.at[k] = get(bias, (i + k) % features);
    return found;
}

// If results are rounded to bfloat16, use the GPU's own exponential and division in float, correct to six digits.
#if KIND == 16 && !defined(ON_THE_HOST)
__device__ inline wide power(wide x) { return __expf(x); }
__device__ inline wide ratio(wide a, wide b) { return __fdividef(a, b); }
#else
__device__ inline wide power(wide x) { return exp(x); }
__device__ inline wide ratio(wide a, wide b) { return a / b; }
#endif

// -- sums over the threads of a block, with the same bits in each thread ------------------------------------------------

template <typename T> __device__ inline T larger(T a, T b) { return a > b || a != a ? a : b; }

template <bool TOP, typename T> __device__ inline T over_block(T v) {
    __shared__ T parts[32];
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int step = 16; step; step >>= 1) {
        T other = __shfl_xor_sync(0xffffffff, v, step);
        v = TOP ? larger(v, other) : v + other;
    }
    __syncthreads();  // all threads have read the results of the previous call
    if (lane == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = parts[0];
    for (int warp = 1; warp < warps; warp++) v = TOP ? larger(v, parts[warp]) : v + parts[warp];
    return v;
}

template <typename T> __device__ inline T sum(T v) { return over_block<false>(v); }

// -- norms over rows: LayerNorm if `centred`, else RMSNorm --------------------------------------------------------------

KERNEL(norm)(const real* x, const real* weight, const real* bias, real* y, wide* mean, wide* rstd, number n, double eps, int centred) {
    number row = blockIdx.x;
    x += row * n, y += row * n;
    wide middle = 0, squares = 0;
    if (centred) {
        PACKS_ALONG(i, n) {
            Pack a(x, i, n);
            LANE(k) middle += a.at[k];
        }
        middle = sum(middle) / n;
    }
    PACKS_ALONG(i, n) {
        Pack a(x, i, n);
        LANE(k) {
            wide c = a.at[k] - middle;
            squares += i + k < n ? c * c : 0;
        }
    }
    wide scale = 1 / sqrt(sum(squares) / n + (wide)eps);
    PACKS_ALONG(i, n) {
        Pack a(x, i, n);
        LANE(k) a.at[k] = (a.at[k] - middle) * scale;
        if (weight) {
            Pack w(weight, i, n);
            LANE(k) a.at[k] *= w.at[k];
        }
        if (bias) {
            Pack b(bias, i, n);
            LANE(k) a.at[k] += b.at[k];
        }
        a.write(y, i, n);
    }
    if (threadIdx.x == 0) {
        if (centred) mean[row] = middle;
        rstd[row] = scale;
    }
}

KERNEL(norm_backward)(const real* x, const real* weight, const wide* mean, const wide* rstd, const real* dy, real* dx, number n, int centred) {
    number row = blockIdx.x;
    x += row * n, dy += row * n, dx += row * n;
    wide middle = centred ? mean[row] : 0, scale = rstd[row], along = 0, total = 0;
    PACKS_ALONG(i, n) {
        Pack a(x, i, n), h(dy, i, n);
        if (weight) {
            Pack w(weight, i, n);
            LANE(k) h.at[k] *= w.at[k];
        }
        LANE(k) {
            along += h.at[k] * ((a.at[k] - middle) * scale);
            total += h.at[k];
        }
    }
    along = sum(along) / n;
    total = centred ? sum(total) / n : 0;
    PACKS_ALONG(i, n) {
        Pack a(x, i, n), h(dy, i, n);
        if (weight) {
            Pack w(weight, i, n);
            LANE(k) h.at[k] *= w.at[k];
        }
        LANE(k) a.at[k] = (h.at[k] - total - (a.at[k] - middle) * scale * along) * scale;
        a.write(dx, i, n);
    }
}

// -- sums over rows: one thread per column adds a part of the rows, another kernel adds the parts -----------------------

KERNEL(norm_columns)(const real* x, const wide* mean, const wide* rstd, const real* dy, wide* gw, wide* gb, number rows, number n, number some, int centred) {
    number i = blockIdx.x * (number)blockDim.x + threadIdx.x, first = blockIdx.y * some;
    if (i >= n) return;
    number last = first + some < rows ? first + some : rows;
    wide w = 0, b = 0;
#pragma unroll 4
    for (number row = first; row < last; row++) {
        wide d = get(dy, row * n + i);
        w += d * ((get(x, row * n + i) - (centred ? mean[row] : 0)) * rstd[row]);
        b += d;
    }
    gw[blockIdx.y * n + i] = w;
    gb[blockIdx.y * n + i] = b;
}

KERNEL(columns)(const real* x, wide* parts, number rows, number n, number some) {
    number i = blockIdx.x * (number)blockDim.x + threadIdx.x, first = blockIdx.y * some;
    if (i >= n) return;
    number last = first + some < rows ? first + some : rows;
    wide v = 0;
#pragma unroll 8
    for (number row = first; row < last; row++) v += get(x, row * n + i);
    parts[blockIdx.y * n + i] = v;
}

template <typename Out> __device__ inline void add_parts_into(const wide* parts, Out* out, number count, number n, int add) {
    EACH(i, n) {
        wide v = 0;
#pragma unroll 16
        for (number part = 0; part < count; part++) v += parts[part * n + i];
        put(out, i, add ? get(out, i) + v : v);
    }
}

KERNEL(add_parts)(const wide* parts, real* out, number count, number n, int add) { add_parts_into(parts, out, count, n, add); }
KERNEL(add_parts_wide)(const wide* parts, wide* out, number count, number n, int add) { add_parts_into(parts, out, count, n, add); }

// -- activations --------------------------------------------------------------------------------------------------------

#define CUBIC (wide)0.044715
#define SLOPE (wide)1.5957691216057308   // 2 sqrt(2 / pi): 1/2 (1 + tanh(u / 2)) = sigmoid(u)
#define DENSITY (wide)0.3989422804014327  // 1 / sqrt(2 pi)
#define ROOT_HALF (wide)0.7071067811865476

__device__ inline wide sigmoid(wide x) {
    wide e = power(-fabs(x));
    return ratio(x < 0 ? e : 1, e + 1);
}

struct Gelu { wide value, slope; };

__device__ inline Gelu gelu_at(wide x, int tanh) {
    if (tanh) {
        wide s = sigmoid(x * (x * x * CUBIC + 1) * SLOPE);
        return {x * s, s + x * s * (1 - s) * ((x * x * (3 * CUBIC) + 1) * SLOPE)};
    }
#if KIND == 16
    // Abramowitz and Stegun 7.1.26: the cumulative distribution within 1e-7, from the exponential that the density needs too
    wide e = power(-x * x / 2), t = ratio(1, 1 + (wide)0.3275911 * ROOT_HALF * fabs(x));
    wide tail = t * ((wide)0.254829592 + t * ((wide)-0.284496736 + t * ((wide)1.421413741 + t * ((wide)-1.453152027 + t * (wide)1.061405429)))) * e / 2;
    wide half = x < 0 ? tail : 1 - tail;
    return {x * half, half + x * e * DENSITY};
#else
    wide half = erfc(-x * ROOT_HALF) / 2;
    return {x * half, half + x * power(-x * x / 2) * DENSITY};
#endif
}

KERNEL(gelu)(const real* x, real* y, number n, int tanh) {
    PACKS(i, n) {
        Pack a(x, i, n);
        LANE(k) a.at[k] = gelu_at(a.at[k], tanh).value;
        a.write(y, i, n);
    }
}

KERNEL(gelu_backward)(const real* x, const real* dy, real* dx, number n, int tanh) {
    PACKS(i, n) {
        Pack a(x, i, n), d(dy, i, n);
        LANE(k) d.at[k] *= gelu_at(a.at[k], tanh).slope;
        d.write(dx, i, n);
    }
}

KERNEL(recompute_gelu_and_backward)(const real* x, real* dy, real* y, number n, int tanh) {
    PACKS(i, n) {
        Pack a(x, i, n), d(dy, i, n);
        LANE(k) {
            Gelu one = gelu_at(a.at[k], tanh);
            a.at[k] = one.value, d.at[k] *= one.slope;
        }
        d.write(dy, i, n);
        a.write(y, i, n);
    }
}

KERNEL(bias_gelu)(real* h, const real* bias, real* y, number n, number features, int tanh) {
    PACKS(i, n) {
        Pack a(h, i, n);
        if (bias) {
            Pack b = of_features(bias, i, features);
            LANE(k) a.at[k] += b.at[k];
            a.round();
            a.write(h, i, n);
        }
        LANE(k) a.at[k] = gelu_at(a.at[k], tanh).value;
        a.write(y, i, n);
    }
}

// -- sums of arrays -----------------------------------------------------------------------------------------------------

KERNEL(relu)(const real* x, real* y, number n) {
    PACKS(i, n) {
        Pack v(x, i, n);
        LANE(k) v.at[k] = v.at[k] > 0 || v.at[k] != v.at[k] ? v.at[k] : 0;
        v.write(y, i, n);
    }
}

KERNEL(relu_backward)(const real* y, const real* dy, real* dx, number n) {
    PACKS(i, n) {
        Pack v(y, i, n), slope(dy, i, n);
        LANE(k) slope.at[k] = v.at[k] > 0 ? slope.at[k] : 0;
        slope.write(dx, i, n);
    }
}

KERNEL(add)(const real* a, const real* b, real* y, number n) {
    PACKS(i, n) {
        Pack one(a, i, n), two(b, i, n);
        LANE(k) one.at[k] += two.at[k];
        one.write(y, i, n);
    }
}

KERNEL(add_bias)(real* y, const real* bias, number n, number features) {
    PACKS(i, n) {
        Pack a(y, i, n), b = of_features(bias, i, features);
        LANE(k) a.at[k] += b.at[k];
        a.write(y, i, n);
    }
}

// -- softmax and cross entropy over rows ----------------------------------------------------------------------------

__device__ inline wide top_of(const real* x, number n) {
    wide top = get(x, 0);
    ALONG(i, n) top = larger(top, get(x, i));
    return over_block<true>(top);
}

__device__ inline wide exponentials(const real* x, wide top, number n) {
    wide total = 0;
    ALONG(i, n) total += exp(get(x, i) - top);
    return sum(total);
}

KERNEL(softmax)(const real* x, real* y, number n) {
    x += blockIdx.x * n, y += blockIdx.x * n;
    wide top = top_of(x, n), total = exponentials(x, top, n);
    ALONG(i, n) put(y, i, exp(get(x, i) - top) / total);
}

KERNEL(softmax_backward)(const real* y, const real* dy, real* dx, number n) {
    y += blockIdx.x * n, dy += blockIdx.x * n, dx += blockIdx.x * n;
    wide along = 0;
    ALONG(i, n) along += get(y, i) * get(dy, i);
    along = sum(along);
    ALONG(i, n) put(dx, i, get(y, i) * (get(dy, i) - along));
}

// Whether the query at position `at` attends to the key at position i: with `causal`, only if the key is not later;
// with `window` (0: no limit), only if it is less than `window` positions earlier; with `segments`, only if both are in
// the same segment.
__device__ inline bool attends(number at, number i, int causal, number window, const number* segments) {
    return (!causal || i <= at) && (!window || i > at - window) && (!segments || segments[i] == segments[at]);
}

// Softmax of rows of scaled scores (heads, t, n). If t equals n, a position attends to itself.
KERNEL(attention_rows)(const wide* scores, real* p, wide* lse, const number* segments, number t, number n, int causal, number window) {
    number row = blockIdx.x, at = row % t;
    scores += row * n, p += row * n;
    wide top = scores[t == n ? at : 0], total = 0;
    ALONG(i, n) if (attends(at, i, causal, window, segments)) top = larger(top, scores[i]);
    top = over_block<true>(top);
    ALONG(i, n) if (attends(at, i, causal, window, segments)) total += exp(scores[i] - top);
    total = sum(total);
    ALONG(i, n) put(p, i, attends(at, i, causal, window, segments) ? exp(scores[i] - top) / total : 0);
    if (threadIdx.x == 0) lse[row] = top + log(total);
}

// Writes the probabilities to `p`, and the gradient of the scores to `ds`, given `dp`, the gradient of the probabilities,
// and `along`, the product of each row of the result with its gradient. In ring attention, `scores` are those of one
// block of keys, but the result is that of all keys.
KERNEL(attention_slopes)(const wide* scores, const wide* dp, const wide* lse, const wide* along, real* p, real* ds, const number* segments, number t, number n, double scale, int causal, number window) {
    number row = blockIdx.x, at = row % t;
    scores += row * n, dp += row * n, p += row * n, ds += row * n;
    wide all = lse[row];
    ALONG(i, n) {
        bool seen = attends(at, i, causal, window, segments);
        wide chance = seen ? exp(scores[i] - all) : 0;
        put(p, i, chance);
        put(ds, i, seen ? chance * (dp[i] - along[row]) * (wide)scale : 0);
    }
}

// The loss is NaN if the target is not a valid class. A row is read once: each thread keeps its maximum, and its sum
// relative to that maximum.
KERNEL(cross_entropy)(const real* logits, const number* target, wide* lse, double* each, number n, number ignored, double smoothing) {
    number row = blockIdx.x, wanted = target[row];
    logits += row * n;
    wide least = -1 / (wide)0, top = least, total = 0;
    PACKS_ALONG(i, n) {
        Pack a(logits, i, n);
        wide most = top;
        LANE(k) if (i + k < n) most = larger(a.at[k], most);
        if (most == least) continue;
        wide more = 0;
        LANE(k) more += i + k < n ? power(a.at[k] - most) : 0;
        total = total * power(top - most) + more;
        top = most;
    }
    wide whole = over_block<true>(top);
    if (whole == least) whole = 0;  // all elements are -inf
    wide all = log(sum(total * power(top - whole))) + whole;
    double mean = 0;
    if (smoothing) {
        ALONG(i, n) mean += get(logits, i);
        mean = sum(mean) / n;
    }
    if (threadIdx.x) return;
    lse[row] = all;
    if (wanted == ignored) each[row] = 0;
    else if (wanted < 0 || wanted >= n) each[row] = nan("");
    else {
        double loss = all - get(logits, wanted);
        each[row] = smoothing ? (1 - smoothing) * loss + smoothing * (all - mean) : loss;
    }
}

KERNEL(cross_entropy_backward)(const real* logits, const number* target, const wide* lse, real* dx, number n, double seed, number ignored, double rest, double share) {
    number row = blockIdx.x, wanted = target[row];
    wide all = lse[row], factor = wanted == ignored ? 0 : seed;
    logits += row * n, dx += row * n;
    PACKS_ALONG(i, n) {
        Pack a(logits, i, n);
        LANE(k) {
            wide v = power(a.at[k] - all) - (i + k == wanted ? (wide)rest : 0) - (wide)share;
            a.at[k] = factor ? v * factor : 0;
        }
        a.write(dx, i, n);
    }
}

// -- gradient of looking up rows: `order` sorts the rows, and the first thread of each run of equal rows sums the run ---

template <typename Out> __device__ inline void add_runs(const number* order, const number* rows, const real* dy, Out* gw, number count, number n) {
    number i = blockIdx.y * (number)blockDim.x + threadIdx.x, first = blockIdx.x;
    if (i >= n || (first && rows[first] == rows[first - 1])) return;
    wide v = 0;
    for (number at = first; at < count && rows[at] == rows[first]; at++) v += get(dy, order[at] * n + i);
    number place = rows[first] * n + i;
    put(gw, place, get(gw, place) + v);
}

KERNEL(embedding)(const number* order, const number* rows, const real* dy, real* gw, number count, number n) { add_runs(order, rows, dy, gw, count, n); }
KERNEL(embedding_wide)(const number* order, const number* rows, const real* dy, wide* gw, number count, number n) { add_runs(order, rows, dy, gw, count, n); }

// -- convolutions -----------------------------------------------------------------------------------------------------

// A window that moves over fields with three dims, given as 18 numbers, three for each property: size, stride,
// dilation, the first cell under the first window, the number of cells of the field, and the number of cells of the
// result. A part of the result has `rows` rows of its first dim, beginning at `begin`.
struct Window {
    int size[3], stride[3], dilation[3], first[3], cells[3], sizes[3];
    number places, field, inner;
    __device__ Window(const number* given) {
        for (int d = 0; d < 3; d++) {
            size[d] = given[d], stride[d] = given[3 + d], dilation[d] = given[6 + d], first[d] = given[9 + d];
            cells[d] = given[12 + d], sizes[d] = given[15 + d];
        }
        places = (number)size[0] * size[1] * size[2], field = (number)cells[0] * cells[1] * cells[2], inner = (number)sizes[1] * sizes[2];
    }
    // The output whose window has the given cell under `place`; -1 if there is none. `at` counts cells from the first
    // one under place 0.
    __device__ int output(int d, int at, int place, int begin, int end) const {
        at -= place * dilation[d];
        if (at < 0) return -1;
        if (stride[d] > 1) {
            int steps = at / stride[d];
            if (steps * stride[d] != at) return -1;
            at = steps;
        }
        return at >= begin && at < end ? at - begin : -1;
    }
};

// Writes the cells under each place of the window: (channels of samples, places, cells of the part of the result).
KERNEL(window_columns)(const real* x, real* columns, const number* window, number begin, number rows, number count) {
    Window w(window);
    number outs = rows * w.inner;
    EACH(i, count) {
        number which = i / outs;
        int o = i % outs, along = o % w.inner;
        int at[3] = {((int)begin + o / (int)w.inner) * w.stride[0], along / w.sizes[2] * w.stride[1], along % w.sizes[2] * w.stride[2]};
        for (int d = 0; d < 3; d++) at[d] += w.first[d];
        const real* from = x + which * w.field;
        real* to = columns + which * w.places * outs + o;
        for (int n = w.size[0], a = at[0]; n--; a += w.dilation[0])
            for (int m = w.size[1], b = at[1]; m--; b += w.dilation[1])
                for (int k = w.size[2], c = at[2]; k--; c += w.dilation[2], to += outs) {
                    bool inside = a >= 0 && a < w.cells[0] && b >= 0 && b < w.cells[1] && c >= 0 && c < w.cells[2];
                    *to = inside ? from[((number)a * w.cells[1] + b) * w.cells[2] + c] : (real)0;
                }
    }
}

// The adjoint of the kernel above: each cell of x is set to the sum over the places at which windows contain it, or
// this sum is added to it.
KERNEL(window_cells)(const wide* columns, wide* x, const number* window, number begin, number rows, number count, int add) {
    Window w(window);
    number outs = rows * w.inner;
    EACH(i, count) {
        number which = i / w.field;
        int cell = i % w.field, inside = cell % (w.cells[1] * w.cells[2]);
        int at[3] = {cell / (w.cells[1] * w.cells[2]) - w.first[0], inside / w.cells[2] - w.first[1], inside % w.cells[2] - w.first[2]};
        const wide* from = columns + which * w.places * outs;
        wide total = 0;
        for (int a = 0; a < w.size[0]; a++) {
            int down = w.output(0, at[0], a, begin, begin + rows);
            for (int b = 0; b < w.size[1]; b++) {
                int along = w.output(1, at[1], b, 0, w.sizes[1]);
                for (int c = 0; c < w.size[2]; c++, from += outs) {
                    int last = down < 0 || along < 0 ? -1 : w.output(2, at[2], c, 0, w.sizes[2]);
                    if (last >= 0) total += from[down * w.inner + along * w.sizes[2] + last];
                }
            }
        }
        x[i] = add ? x[i] + total : total;
    }
}

// -- pools ------------------------------------------------------------------------------------------------------------

// Writes the largest cell under each window and its place. Ties go to the first cell, and NaN counts as largest.
// Without `winner`, writes the sum of the cells divided by `divisor`, where cells outside the field count as zeros.
KERNEL(pool)(const real* x, real* y, int* winner, const number* window, number divisor, number count) {
    Window w(window);
    number outs = w.sizes[0] * w.inner;
    EACH(i, count) {
        int o = i % outs, along = o % w.inner;
        int at[3] = {o / (int)w.inner * w.stride[0], along / w.sizes[2] * w.stride[1], along % w.sizes[2] * w.stride[2]};
        for (int d = 0; d < 3; d++) at[d] += w.first[d];
        const real* from = x + i / outs * w.field;
        wide best = -INFINITY, total = 0;
        int place = 0, best_place = 0;
        for (int n = w.size[0], a = at[0]; n--; a += w.dilation[0])
            for (int m = w.size[1], b = at[1]; m--; b += w.dilation[1])
                for (int k = w.size[2], c = at[2]; k--; c += w.dilation[2], place++) {
                    if (a < 0 || a >= w.cells[0] || b < 0 || b >= w.cells[1] || c < 0 || c >= w.cells[2]) continue;
                    wide v = get(from, ((number)a * w.cells[1] + b) * w.cells[2] + c);
                    total += v;
                    if (v > best || v != v) best = v, best_place = place;
                }
        put(y, i, winner ? best : total / divisor);
        if (winner) winner[i] = best_place;
    }
}

KERNEL(pool_backward)(const real* dy, const int* winner, real* dx, const number* window, number divisor, number count) {
    Window w(window);
    number outs = w.sizes[0] * w.inner;
    EACH(i, count) {
        int cell = i % w.field, inside = cell % (w.cells[1] * w.cells[2]);
        int at[3] = {cell / (w.cells[1] * w.cells[2]) - w.first[0], inside / w.cells[2] - w.first[1], inside % w.cells[2] - w.first[2]};
        number from = i / w.field * outs;
        wide total = 0;
        int place = 0;
        for (int a = 0; a < w.size[0]; a++) {
            int down = w.output(0, at[0], a, 0, w.sizes[0]);
            for (int b = 0; b < w.size[1]; b++) {
                int along = w.output(1, at[1], b, 0, w.sizes[1]);
                for (int c = 0; c < w.size[2]; c++, place++) {
                    int last = down < 0 || along < 0 ? -1 : w.output(2, at[2], c, 0, w.sizes[2]);
                    if (last < 0) continue;
                    number out = from + down * w.inner + along * w.sizes[2] + last;
                    if (!winner || winner[out] == place) total += get(dy, out);
                }
            }
        }
        put(dx, i, winner ? total : total / divisor);
    }
}

// -- channels: arrays (samples, channels, cells), and a double for each channel -----------------------------------------

__device__ inline number channel_of(number i, number cells, number channels) {
    return i < 0x7fffffff && cells < 0x7fffffff ? (unsigned)i / (unsigned)cells % (unsigned)channels : i / cells % channels;
}

// Sums over parts of `some` elements of each channel, (parts, one or two sums, channels): of x; with `mean`, of
// (x - mean)^2; with `rstd`, of dy, and of dy (x - mean) rstd.
KERNEL(channel_parts)(const real* x, const real* dy, const double* mean, const double* rstd, double* parts, number channels, number cells, number count, number some) {
    number channel = blockIdx.x, first = blockIdx.y * some, size = count - first < some ? count - first : some;
    wide centre = mean ? (wide)mean[channel] : 0, factor = rstd ? (wide)rstd[channel] : 0;
    double one = 0, two = 0;
    ALONG(i, size) {
        number at = first + i, sample = at < 0x7fffffff ? (unsigned)at / (unsigned)cells : at / cells;
        at += (sample * (channels - 1) + channel) * cells;
        wide v = get(x, at), slope = dy ? get(dy, at) : 0;
        if (!mean) one += v;
        else if (!rstd) one += (v - centre) * (v - centre);
        else one += slope, two += slope * ((v - centre) * factor);
    }
    one = sum(one);
    if (rstd) two = sum(two);
    if (threadIdx.x) return;
    number at = blockIdx.y * (number)channels * (rstd ? 2 : 1) + channel;
    parts[at] = one;
    if (rstd) parts[at + channels] = two;
}

KERNEL(add_doubles)(const double* parts, double* out, number count, number n) {
    EACH(i, n) {
        double v = 0;
        for (number part = 0; part < count; part++) v += parts[part * n + i];
        out[i] = v;
    }
}

// For each of n channels: rstd = 1 / sqrt(squares / count + eps), and rstd weight; running statistics move by momentum.
KERNEL(batch_norm_scales_and_running_stats)(const double* squares, const double* mean, const real* weight, wide* running_mean, wide* running_var, double* rstd, double* scale, number n, double count, double eps, double momentum) {
    EACH(i, n) {
        double var = squares[i] / (count > 1 ? count : 1), one = 1 / sqrt(var + eps);
        rstd[i] = one;
        scale[i] = weight ? one * (double)get(weight, i) : one;
        if (!running_mean || count == 0) continue;
        var *= count / (count > 2 ? count - 1 : 1);
        wide rest = (wide)(1 - momentum);
        running_mean[i] = running_mean[i] * rest + (wide)(momentum * mean[i]);
        running_var[i] = running_var[i] * rest + (wide)(momentum * var);
    }
}

// For each of n channels: rstd weight, and the two numbers in `sums`, of dy and of dy (x - mean) rstd, divided by count;
// the second is also multiplied by rstd.
KERNEL(batch_norm_backward_factors)(const double* sums, const double* rstd, const real* weight, double* scale, double* along, double* across, number n, double count) {
    double whole = count > 1 ? count : 1;
    EACH(i, n) {
        scale[i] = weight ? rstd[i] * (double)get(weight, i) : rstd[i];
        along[i] = sums[i] / whole;
        across[i] = sums[n + i] / whole * rstd[i];
    }
}

KERNEL(channel_affine)(const real* x, real* y, const double* mean, const double* scale, const double* shift, number n, number channels, number cells) {
    EACH(i, n) {
        number c = channel_of(i, cells, channels);
        put(y, i, (get(x, i) - (wide)mean[c]) * (wide)scale[c] + (wide)shift[c]);
    }
}

KERNEL(channel_norm_backward_input)(const real* dy, const real* x, real* dx, const double* mean, const double* scale, const double* along, const double* across, number n, number channels, number cells) {
    EACH(i, n) {
        number c = channel_of(i, cells, channels);
        put(dx, i, (get(dy, i) - (wide)along[c] - (get(x, i) - (wide)mean[c]) * (wide)across[c]) * (wide)scale[c]);
    }
}

KERNEL(multiply_along_dim)(const real* x, real* y, const number* starts, const number* sources, const wide* weights, number n, number cells, number outputs, number inner) {
    EACH(i, n) {
        number j = i % inner, o = i / inner % outputs, line = i / inner / outputs;
        wide sum = 0;
        for (number k = starts[o]; k < starts[o + 1]; k++) sum += weights[k] * get(x, (line * cells + sources[k]) * inner + j);
        put(y, i, sum);
    }
}

KERNEL(group_norm_backward)(const real* dy, const real* x, real* dx, const double* mean, const double* scale, const double* along, const double* across, number n, number channels, number cells) {
    EACH(i, n) {
        number c = channel_of(i, cells, channels);
        put(dx, i, get(dy, i) * (wide)scale[c] - (wide)along[c] - (get(x, i) - (wide)mean[c]) * (wide)across[c]);
    }
}

// -- formats, norms, dropout ------------------------------------------------------------------------------------------

KERNEL(widen)(const real* x, wide* out, number n, int add) {
    EACH(i, n) out[i] = add ? out[i] + get(x, i) : get(x, i);
}

KERNEL(narrow)(const wide* x, real* out, number n) {
    EACH(i, n) put(out, i, x[i]);
}

// The sum of `size` elements, or of their squares, in the order of the host (`sum_each_row_in_fixed_order`), with a thread per lane.
template <bool SQUARES, typename In> __device__ inline double sum_in_lanes(const In* x, number size) {
    __shared__ double lanes[1024];
    double total = 0;
    ALONG(i, size) {
        double v = get(x, i);
        total += SQUARES ? v * v : v;
    }
    lanes[threadIdx.x] = total;
    for (int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
    }
    return lanes[0];  // only thread 0 may use it
}

KERNEL(sum_squares_of_blocks)(const real* x, double* out, number n, number grain) {
    number first = blockIdx.x * grain;
    double v = sum_in_lanes<true>(x + first, n - first < grain ? n - first : grain);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
}

KERNEL(add_sums)(const double* sums, double* out, number n) {
    double v = sum_in_lanes<false>(sums, n);
    if (threadIdx.x == 0) out[0] = v;
}

// Philox 4x64 with 10 rounds (Salmon et al., SC'11): numbers 4 (counter - 1) to 4 (counter - 1) + 3 of the stream.
__device__ inline void philox(unsigned long long counter, unsigned long long key0, unsigned long long key1, unsigned long long* out) {
    const unsigned long long factor0 = 0xD2E7470EE14C6C93ull, factor1 = 0xCA5A826395121157ull;
    unsigned long long a = counter, b = 0, c = 0, d = 0;
    for (int round = 0; round < 10; round++) {
        unsigned long long high0 = __umul64hi(factor0, a), low0 = factor0 * a, high1 = __umul64hi(factor1, c), low1 = factor1 * c;
        a = high1 ^ b ^ key0, b = low1, c = high0 ^ d ^ key1, d = low0;
        key0 += 0x9E3779B97F4A7C15ull, key1 += 0xBB67AE8584CAA73Bull;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

KERNEL(drop)(const real* x, real* y, bool* keep, number n, const unsigned long long* at, number start, unsigned long long key0, unsigned long long key1, float p, double scale) {
    if (at) { start = at[0]; key0 = at[1]; key1 = at[2]; }  // in a graph
    number ahead = start & 3;
    EACH(group, (n + ahead + 3) / 4) {
        unsigned long long numbers[4];
        philox((start >> 2) + 1 + group, key0, key1, numbers);
        for (int k = 0; k < 4; k++) {
            number i = 4 * group + k - ahead;
            if (i < 0 || i >= n) continue;
            keep[i] = (float)(numbers[k] >> 40) * 5.9604644775390625e-8f >= p;
            put(y, i, keep[i] ? get(x, i) * (wide)scale : (wide)0);
        }
    }
}

KERNEL(drop_backward)(const real* dy, const bool* keep, real* dx, number n, double scale) {
    EACH(i, n) put(dx, i, keep[i] ? get(dy, i) * (wide)scale : (wide)0);
}

// -- updates of a flat shard: the operations of the loops in fsdpx/optim, in the same order -----------------------------

#if KIND != 16

KERNEL(sgd)(real* p, const real* g, number n, real scale, real l2, real lr) {
    EACH(i, n) {
        real a = g[i] * scale;
        if (l2 != 0) a = a + p[i] * l2;
        p[i] = p[i] - a * lr;
    }
}

KERNEL(momentum)(real* p, const real* g, real* m, number n, real scale, real l2, real lr, real mu, real nesterov) {
    EACH(i, n) {
        real a = g[i] * scale;
        if (l2 != 0) a = a + p[i] * l2;
        m[i] = m[i] * mu + a;
        a = nesterov != 0 ? a + m[i] * mu : m[i];
        p[i] = p[i] - a * lr;
    }
}

KERNEL(adam)(real* p, const real* g, real* m, real* v, number n, real scale, real l2, real keep, real share1, real beta2, real share2, real unbias, real eps, real rate) {
    EACH(i, n) {
        real x = p[i], a = g[i] * scale;
        if (l2 != 0) a = a + x * l2;
        real mi = m[i] + (a - m[i]) * share1, vi = v[i] * beta2 + (a * a) * share2;
        m[i] = mi, v[i] = vi;
        p[i] = x * keep - (mi / (sqrt(vi) * unbias + eps)) * rate;
    }
}

KERNEL(lion)(real* p, const real* g, real* m, number n, real scale, real keep, real share1, real share2, real lr) {
    EACH(i, n) {
        real a = g[i] * scale, b = (a - m[i]) * share1 + m[i];
        real sign = b > 0 ? 1 : b < 0 ? -1 : b;
        p[i] = p[i] * keep - sign * lr;
        m[i] = m[i] + (a - m[i]) * share2;
    }
}

KERNEL(update_moments)(real* m, real* v, const real* g, number n, real scale, real share1, real beta2, real share2) {
    EACH(i, n) {
        real a = g[i] * scale;
        m[i] = m[i] + (a - m[i]) * share1;
        v[i] = v[i] * beta2 + (a * a) * share2;
    }
}

__device__ inline real step_of(const real* p, const real* m, const real* v, number i, real unbias1, real unbias2, real eps, real decay) {
    real a = (m[i] * unbias1) / (sqrt(v[i]) * unbias2 + eps);
    return decay != 0 ? a + p[i] * decay : a;
}

KERNEL(compute_direction)(real* u, const real* p, const real* m, const real* v, number n, real unbias1, real unbias2, real eps, real decay) {
    EACH(i, n) u[i] = step_of(p, m, v, i, unbias1, unbias2, eps, decay);
}

KERNEL(step_along_direction)(real* p, const real* m, const real* v, number n, real unbias1, real unbias2, real eps, real decay, real rate) {
    EACH(i, n) p[i] = p[i] - step_of(p, m, v, i, unbias1, unbias2, eps, decay) * rate;
}

#endif
