#pragma once

// Runs CUDA device code on the CPU. A kernel's source is included after this header and compiled by g++ as it is; blocks
// run one after another, and the threads of a block meet at __syncthreads and at warp intrinsics.
//
// By default a CUDA thread is a fiber of one OS thread: deterministic, in an order that shim::order chooses, so that a
// missing barrier shows as a wrong result, and a barrier that threads of a block reach at different lines aborts.
// With -DCUDA_SHIM_THREADS it is an OS thread, for -fsanitize=thread.
//
// It tells nothing about speed, registers, limits of a launch, or fast math.

#define CUDA_SHIM

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#ifdef CUDA_SHIM_THREADS
#include <condition_variable>
#include <mutex>
#include <thread>
#else
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// blocks run one after another: a static local is shared by the threads of a block, and by no others at a time
#define __shared__ static

struct dim3 {
    unsigned x, y, z;

    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace shim {

static constexpr unsigned n_warp      = 32;
static constexpr unsigned n_block_max = 1024;

enum wait_t { RUN, BLOCK, WARP, DONE };

struct cuda_thread {
    dim3     tid;
    unsigned lin;
    wait_t   state;
    int      line;

#ifndef CUDA_SHIM_THREADS
    ucontext_t        ctx;
    std::vector<char> stack;
#endif
};

// the order in which the threads of a block run: as numbered, reversed, or (from 2 on) shuffled by this seed
inline unsigned order = 0;

inline dim3                     grid;
inline dim3                     block;
inline std::function<void()>    body;
inline std::vector<cuda_thread> threads;

// values on their way between the lanes of a warp; two, so that a fast lane does not overwrite what a slow one reads
inline uint64_t slot[2][n_block_max];
inline unsigned n_exchange[n_block_max];

#ifdef CUDA_SHIM_THREADS

inline thread_local cuda_thread * cur = nullptr;
inline thread_local dim3          bid;

class barrier {
public:
    void reset(unsigned n) {
        expected = n;
        arrived  = 0;
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const unsigned               p = phase;
        if (++arrived == expected) {
            arrived = 0;
            phase++;
            cv.notify_all();
        } else {
            cv.wait(lock, [&] { return phase != p; });
        }
    }

private:
    std::mutex              mutex;
    std::condition_variable cv;
    unsigned                expected = 0;
    unsigned                arrived  = 0;
    unsigned                phase    = 0;
};

inline barrier bar_block;
inline barrier bar_warp[n_block_max / n_warp];

inline void wait(wait_t what, int) {
    if (what == BLOCK) {
        bar_block.wait();
    } else {
        bar_warp[cur->lin / n_warp].wait();
    }
}

// the OS threads live as long as the launch; a thread that returns early waits for the others at the end of the block,
// so it must not leave them alone at a barrier
inline void run(const std::vector<unsigned> & ids) {
    const unsigned n = (unsigned) threads.size();
    bar_block.reset(n);
    for (unsigned w = 0; w < n; w += n_warp) {
        bar_warp[w / n_warp].reset(std::min(n_warp, n - w));
    }
    std::vector<std::thread> os;
    for (unsigned i : ids) {
        os.emplace_back([i] {
            cur = &threads[i];
            for (unsigned z = 0; z < grid.z; ++z) {
                for (unsigned y = 0; y < grid.y; ++y) {
                    for (unsigned x = 0; x < grid.x; ++x) {
                        bid = dim3(x, y, z);
                        body();
                        bar_block.wait();
                    }
                }
            }
        });
    }
    for (auto & t : os) {
        t.join();
    }
}

#else

inline cuda_thread * cur = nullptr;
inline dim3          bid;
inline ucontext_t    ctx_main;

inline void wait(wait_t what, int line) {
    cur->state = what;
    cur->line  = line;
    swapcontext(&cur->ctx, &ctx_main);
}

inline void entry() {
    body();
    cur->state = DONE;
    swapcontext(&cur->ctx, &ctx_main);
}

[[noreturn]] inline void die(const char * msg, const cuda_thread & t) {
    fprintf(stderr, "cuda-shim: %s (block %u,%u,%u, thread %u waits at line %d)\n", msg, bid.x, bid.y, bid.z, t.lin,
            t.line);
    abort();
}

// lets a warp go on where all of its threads wait for each other
inline bool release_warp(unsigned warp) {
    const auto begin = threads.begin() + warp * n_warp;
    const auto end   = threads.begin() + std::min((size_t) (warp + 1) * n_warp, threads.size());
    const bool all   = std::all_of(begin, end, [](const cuda_thread & t) { return t.state == WARP; });
    for (auto t = begin; all && t != end; ++t) {
        t->state = RUN;
    }
    return all;
}

// lets the block go on where all of its threads wait; false when they could not
inline bool release_block() {
    const size_t n_block =
            std::count_if(threads.begin(), threads.end(), [](const cuda_thread & t) { return t.state == BLOCK; });
    if (n_block == threads.size()) {
        for (auto & t : threads) {
            if (t.line != threads[0].line) {
                die("threads of one block wait at different barriers", t);
            }
            t.state = RUN;
        }
        return true;
    }
    return false;
}

inline void run_block(const std::vector<unsigned> & ids) {
    for (auto & t : threads) {
        getcontext(&t.ctx);
        t.stack.resize(64 * 1024);
        t.ctx.uc_stack.ss_sp   = t.stack.data();
        t.ctx.uc_stack.ss_size = t.stack.size();
        t.ctx.uc_link          = nullptr;
        t.state                = RUN;
        makecontext(&t.ctx, (void (*)()) entry, 0);
    }
    // warps in the order of their first threads
    std::vector<unsigned> warps;
    for (unsigned i : ids) {
        if (std::find(warps.begin(), warps.end(), i / n_warp) == warps.end()) {
            warps.push_back(i / n_warp);
        }
    }
    for (;;) {
        // each goes as far as it can before the next one starts
        for (unsigned warp : warps) {
            do {
                for (unsigned i : ids) {
                    if (i / n_warp == warp && threads[i].state == RUN) {
                        cur = &threads[i];
                        swapcontext(&ctx_main, &cur->ctx);
                    }
                }
            } while (release_warp(warp));
        }
        const auto all_done = [](const cuda_thread & t) {
            return t.state == DONE;
        };
        if (std::all_of(threads.begin(), threads.end(), all_done)) {
            return;
        }
        if (!release_block()) {
            die("not all threads reach this barrier or intrinsic",
                    *std::find_if_not(threads.begin(), threads.end(), all_done));
        }
    }
}

inline void run(const std::vector<unsigned> & ids) {
    for (bid.z = 0; bid.z < grid.z; ++bid.z) {
        for (bid.y = 0; bid.y < grid.y; ++bid.y) {
            for (bid.x = 0; bid.x < grid.x; ++bid.x) {
                run_block(ids);
            }
        }
    }
}

#endif

template <typename F, typename... A>
void launch(F kernel, dim3 g, dim3 b, A... args) {
    const unsigned n = b.x * b.y * b.z;

    grid  = g;
    block = b;
    body  = [=] {
        kernel(args...);
    };
    threads.resize(n);
    for (unsigned i = 0; i < n; ++i) {
        threads[i].lin = i;
        threads[i].tid = dim3(i % b.x, i / b.x % b.y, i / (b.x * b.y));
        n_exchange[i]  = 0;
    }

    std::vector<unsigned> ids(n);
    std::iota(ids.begin(), ids.end(), 0u);
    if (order == 1) {
        std::reverse(ids.begin(), ids.end());
    } else if (order > 1) {
        std::mt19937 rng(order);
        std::shuffle(ids.begin(), ids.end(), rng);
    }
    run(ids);
}

template <typename T>
T exchange(T value, unsigned lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "too large for one exchange");

    const unsigned lin = cur->lin;
    const unsigned i   = n_exchange[lin]++ % 2;
    memcpy(&slot[i][lin], &value, sizeof(T));
    wait(WARP, 0);

    T res;
    memcpy(&res, &slot[i][lin / n_warp * n_warp + lane], sizeof(T));
    return res;
}

} // namespace shim

#define threadIdx (shim::cur->tid)
#define blockIdx  (shim::bid)
#define blockDim  (shim::block)
#define gridDim   (shim::grid)

static inline void __syncthreads(int line = __builtin_LINE()) {
    shim::wait(shim::BLOCK, line);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
    const unsigned lane = shim::cur->lin % shim::n_warp;
    const unsigned from = lane ^ mask;
    return shim::exchange(value, from / width == lane / width ? from : lane);
}

// --- types and conversions, unless another stub brings its own

#ifndef CUDA_SHIM_NO_TYPES

struct float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

struct half {
    uint16_t bits;
};

struct alignas(4) half2 {
    half x, y;
};

static inline float2 make_float2(float x, float y) {
    return { x, y };
}

static inline float4 make_float4(float x, float y, float z, float w) {
    return { x, y, z, w };
}

static inline float __uint_as_float(unsigned bits) {
    float res;
    memcpy(&res, &bits, sizeof(res));
    return res;
}

static inline unsigned __float_as_uint(float x) {
    unsigned res;
    memcpy(&res, &x, sizeof(res));
    return res;
}

static inline float __half2float(half h) {
    const int   exponent = h.bits >> 10 & 31;
    const int   mantissa = h.bits & 1023;
    const float res      = exponent == 31  ? (mantissa ? NAN : INFINITY)
                           : exponent == 0 ? ldexpf((float) mantissa, -24)
                                           : ldexpf((float) (mantissa + 1024), exponent - 25);
    return h.bits >> 15 ? -res : res;
}

static inline float2 __half22float2(half2 h) {
    return { __half2float(h.x), __half2float(h.y) };
}

// to the nearest, to even where two are as near: nearbyint() in units of the last place
static inline half __float2half_rn(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) {
        return { 0x7fff };
    }
    int e;
    frexpf(x, &e);
    e             = x == 0.0f ? -13 : std::max(e, -13); // below are denormals
    const float m = nearbyintf(ldexpf(fabsf(x), 11 - e));
    // a mantissa that has become too large carries into the exponent
    const int bits = (int) std::min(m + 1024.0f * (e + 13), 1024.0f * 31);
    return { (uint16_t) (sign | bits) };
}

static inline half2 __floats2half2_rn(float x, float y) {
    return { __float2half_rn(x), __float2half_rn(y) };
}

#endif
