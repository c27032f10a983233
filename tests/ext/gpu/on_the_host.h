// CUDA C as C++ of the host: the threads of a block are fibers, which take turns where they wait for each other. Blocks run
// one after the other. What a thread gives to a shuffle the others read after all have given theirs.
//
// A fiber gets its stack by swapcontext, once; from then on it is left and entered by _setjmp and _longjmp, as swapcontext
// asks the system to keep the signal mask each time.
#include <csetjmp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define ON_THE_HOST
#define __global__
#define __launch_bounds__(threads, blocks)
#define __device__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct Place { unsigned x, y, z; };
static Place blockIdx, threadIdx, blockDim, gridDim;

static const int MOST = 1024, STACK = 32 << 10;
static jmp_buf scheduler, fibers[MOST];
static bool made[MOST], done[MOST];
static char* stacks;
static void (*body)(void*);
static void* given;
static char lanes[MOST][8];

// The variables of both functions lie on the stack of who calls, which stays as it is meanwhile.
static __attribute__((noinline)) void leave(int thread) {
    if (!_setjmp(fibers[thread])) _longjmp(scheduler, 1);
}

static void live(int thread) {
    for (;; leave(thread)) {
        body(given);
        done[thread] = true;
    }
}

static __attribute__((noinline)) void enter(int thread) {
    if (_setjmp(scheduler)) return;
    if (made[thread]) _longjmp(fibers[thread], 1);
    ucontext_t here, there;
    getcontext(&there);
    there.uc_stack.ss_sp = stacks + (size_t)thread * STACK;
    there.uc_stack.ss_size = STACK;
    makecontext(&there, (void (*)())live, 1, thread);
    made[thread] = true;
    swapcontext(&here, &there);
}

static void __syncthreads() {
    int thread = threadIdx.x;
    leave(thread);
    threadIdx.x = thread;
}

template <typename T> static T __shfl_xor_sync(unsigned, T v, int step) {
    int thread = threadIdx.x;
    memcpy(lanes[thread], &v, sizeof v);
    __syncthreads();
    T other;
    memcpy(&other, lanes[thread ^ step], sizeof v);
    __syncthreads();
    return other;
}

// The matrix units: threads of a warp lay down what they have, and each reads what its part of the result needs.
static unsigned left[MOST][4], right[MOST][2];
static const unsigned short* rows[MOST];

static float element(unsigned both, int which) {
    unsigned bits = (both >> 16 * which) << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

static void mma(float* c, const unsigned* a, const unsigned* b) {
    int thread = threadIdx.x, warp = thread & ~31, lane = thread & 31;
    memcpy(left[thread], a, sizeof left[0]), memcpy(right[thread], b, sizeof right[0]);
    __syncthreads();
    for (int e = 0; e < 4; e++) {
        int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k++) {
            unsigned one = left[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], two = right[warp + column * 4 + k % 8 / 2][k / 8];
            c[e] += element(one, k % 2) * element(two, k % 2);
        }
    }
    __syncthreads();
}

template <bool TURNED> static void matrices(unsigned* out, const unsigned short* row) {
    int thread = threadIdx.x, warp = thread & ~31, lane = thread & 31;
    rows[thread] = row;
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        int down = lane / 4, along = lane % 4 * 2, first = warp + 8 * i;
        unsigned low = TURNED ? rows[first + along][down] : rows[first + down][along];
        unsigned high = TURNED ? rows[first + along + 1][down] : rows[first + down][along + 1];
        out[i] = low | high << 16;
    }
    __syncthreads();
}

static unsigned rounded(float low, float high) {
    unsigned short parts[2];
    float both[2] = {low, high};
    for (int i = 0; i < 2; i++) {
        unsigned bits;
        memcpy(&bits, &both[i], 4);
        parts[i] = both[i] != both[i] ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    }
    return parts[0] | (unsigned)parts[1] << 16;
}

struct uint4 { unsigned x, y, z, w; };

static void begin_copy(unsigned short* to, const unsigned short* from, bool there) {
    if (there) memcpy(to, from, 16);
    else memset(to, 0, 16);
}
static void arrive() {}

static float __uint_as_float(unsigned bits) { float v; memcpy(&v, &bits, 4); return v; }
static unsigned __float_as_uint(float v) { unsigned bits; memcpy(&bits, &v, 4); return bits; }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}

template <typename Call> static void run(int blocks_x, int blocks_y, int threads, Call call) {
    if (!stacks) stacks = (char*)malloc((size_t)MOST * STACK);
    body = [](void* one) { (*(Call*)one)(); };
    given = &call;
    gridDim = {(unsigned)blocks_x, (unsigned)blocks_y, 1}, blockDim = {(unsigned)threads, 1, 1};
    for (int block = 0; block < blocks_x * blocks_y; block++) {
        blockIdx = {(unsigned)(block % blocks_x), (unsigned)(block / blocks_x), 0};
        memset(done, 0, sizeof done);
        for (int left = threads; left;)
            for (int thread = 0; thread < threads; thread++)
                if (!done[thread]) {
                    threadIdx.x = thread;
                    enter(thread);
                    left -= done[thread];
                }
    }
}

using std::exp; using std::fabs; using std::log; using std::sqrt; using std::erfc;
