#pragma once

// Device code of GGML_OP_ATTN_SCORE: the attention that each key receives from given query rows, with no logits in memory.
//
// K is read twice. attn_score_rows finds the maximum and the sum of each row, a part of the keys per block;
// attn_score_combine joins the parts and folds sink, weight and norm into one factor per row; attn_score_columns
// computes the logits once more and adds up columns. A row is one query of one head. No atomics: the result does not
// depend on the order of blocks.
//
// Logits of a tile of keys and rows are what a type T computes, by which the kernels are made: attn_score_plain in f32,
// below, or attn_score_mma of attn-score-mma.cuh by matrix units.
//
// Nothing here needs ggml, and nothing but plain CUDA C++ is used (no PTX, no CUB, no dynamic shared memory): the tests
// compile these files for the CPU as well, with native/ggml/tests/gpu/cuda-shim.h.

#include "attn-score-types.cuh"

#include <cstdint>

// a block has 8 groups of 16 threads; a thread has 4 keys, 16 apart, and 1, 2 or 4 rows
static constexpr int ATTN_SCORE_THREADS = 128;
static constexpr int ATTN_SCORE_LANES   = 16;
static constexpr int ATTN_SCORE_GROUPS  = ATTN_SCORE_THREADS / ATTN_SCORE_LANES;
static constexpr int ATTN_SCORE_COLS    = 4;
static constexpr int ATTN_SCORE_KEYS    = ATTN_SCORE_LANES * ATTN_SCORE_COLS;

// blocks that a multiprocessor has to take at a time: up to 128 registers for each thread, and none is spilled
static constexpr int ATTN_SCORE_RESIDENT = 4;

// embedding dimensions in shared memory at a time, in fours; one more float4 per row keeps banks apart
static constexpr int ATTN_SCORE_CHUNK  = 8;
static constexpr int ATTN_SCORE_STRIDE = ATTN_SCORE_CHUNK + 1;

// the grid of attn_score_rows aims at this number of blocks
static constexpr int ATTN_SCORE_BLOCKS = 1024;

struct attn_score_args {
    const char *  q;       // F32 [d, n_q, n_head, n_seq]
    const char *  k;       // [d, n_kv, n_head_kv, n_seq]
    const char *  mask;    // [n_kv, n_q, 1, n_seq] or null
    const float * sinks;   // [n_head] or null
    const float * weights; // [n_q] or null
    const char *  acc;     // as dst, or null; may be dst
    char *        dst;     // F32 [n_kv, n_head_kv, n_seq]

    float2 * part; // [n_split, rows of all heads and sequences]: maximum and sum of a part of the keys
    float2 * stat; // [rows of all heads and sequences]: maximum and factor

    // of attn-score-mma.cuh only: queries in halves, with zeros up to n_rows_pad and d_pad
    half *  q_half;  // [d_pad, 2, n_rows_pad, n_head_kv, n_seq]
    float * q_scale; // [n_rows_pad, n_head_kv, n_seq]: by which their products have to be multiplied

    int64_t nbq1, nbq2, nbq3;
    int64_t nbk1, nbk2, nbk3;
    int64_t nbm1, nbm3;
    int64_t nba1, nba2;
    int64_t nbd1, nbd2;

    int d;
    int n_kv;
    int n_q;
    int n_head_kv;
    int n_group; // heads per KV head
    int n_seq;
    int n_split;
    int mask_f16;
    int d_pad;
    int n_rows_pad;

    float scale;
    float logit_softcap;
    float norm;
};

// --- logits

// A masked key is out whatever its row of K holds: free cells may hold anything, NaN included.
static __device__ __forceinline__ float attn_score_logit(
        const attn_score_args & a, float x, int row, int key, int seq) {
    float m = 0.0f;
    if (a.mask) {
        const char * p = a.mask + seq * a.nbm3 + (row % a.n_q) * a.nbm1;
        m              = a.mask_f16 ? attn_score_half(p + 2 * (int64_t) key) : ((const float *) p)[key];
        if (m == -INFINITY) {
            return -INFINITY;
        }
    }
    x *= a.scale;
    if (a.logit_softcap != 0.0f) {
        // tanh by way of exp, since fast math has a tanh of 11 bits only
        x = a.logit_softcap * (1.0f - 2.0f / (1.0f + expf(2.0f * x / a.logit_softcap)));
    }
    return x + m;
}

// x[][] of a tile becomes logits
template <int NR>
static __device__ __forceinline__ void attn_score_finish(
        const attn_score_args & a, int key0, int row0, int seq, float (&x)[NR][ATTN_SCORE_COLS]) {
    const int lane   = threadIdx.x % ATTN_SCORE_LANES;
    const int group  = threadIdx.x / ATTN_SCORE_LANES;
    const int n_rows = a.n_q * a.n_group;

#pragma unroll
    for (int r = 0; r < NR; ++r) {
        const int row = row0 + group * NR + r;
#pragma unroll
        for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
            const int key = key0 + lane + ATTN_SCORE_LANES * c;
            x[r][c]       = row < n_rows && key < a.n_kv ? attn_score_logit(a, x[r][c], row, key, seq) : -INFINITY;
        }
    }
}

// logits of the keys from key0 on and the rows from row0 on; x[r][c] belongs to row0 + NR * (thread / 16) + r and
// key0 + thread % 16 + 16 * c. All threads of the block take part.
template <typename K, int NR>
struct attn_score_plain {
    static constexpr int ROWS     = NR;                                         // of a thread
    static constexpr int SHARED_Q = ATTN_SCORE_GROUPS * NR * ATTN_SCORE_STRIDE; // size of sq

    static __device__ __forceinline__ void tile(const attn_score_args & a, float4 * sk, float4 * sq, int key0, int row0,
            int head_kv, int seq, float (&x)[NR][ATTN_SCORE_COLS]) {
        const int lane   = threadIdx.x % ATTN_SCORE_LANES;
        const int group  = threadIdx.x / ATTN_SCORE_LANES;
        const int n_rows = a.n_q * a.n_group;

        const char * k = a.k + seq * a.nbk3 + head_kv * a.nbk2;
        const char * q = a.q + seq * a.nbq3 + (int64_t) head_kv * a.n_group * a.nbq2;

#pragma unroll
        for (int r = 0; r < NR; ++r) {
#pragma unroll
            for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                x[r][c] = 0.0f;
            }
        }

        for (int i0 = 0; i0 < a.d; i0 += 4 * ATTN_SCORE_CHUNK) {
            __syncthreads(); // until the chunk before has been read

            for (int t = threadIdx.x; t < ATTN_SCORE_KEYS * ATTN_SCORE_CHUNK; t += ATTN_SCORE_THREADS) {
                const int key = t / ATTN_SCORE_CHUNK;
                const int i   = i0 + 4 * (t % ATTN_SCORE_CHUNK);

                sk[key * ATTN_SCORE_STRIDE + t % ATTN_SCORE_CHUNK] =
                        key0 + key < a.n_kv && i < a.d ? K::load(k + (int64_t) (key0 + key) * a.nbk1, i)
                                                       : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
            for (int t = threadIdx.x; t < ATTN_SCORE_GROUPS * NR * ATTN_SCORE_CHUNK; t += ATTN_SCORE_THREADS) {
                const int row = row0 + t / ATTN_SCORE_CHUNK;
                const int i   = i0 + 4 * (t % ATTN_SCORE_CHUNK);

                sq[t / ATTN_SCORE_CHUNK * ATTN_SCORE_STRIDE + t % ATTN_SCORE_CHUNK] =
                        row < n_rows && i < a.d ? *(const float4 *) (q + (row / a.n_q) * a.nbq2 +
                                                                     (row % a.n_q) * a.nbq1 + 4 * (int64_t) i)
                                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }

            __syncthreads(); // until the chunk is there

#pragma unroll
            for (int i = 0; i < ATTN_SCORE_CHUNK; ++i) {
                float4 kv[ATTN_SCORE_COLS];
#pragma unroll
                for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                    kv[c] = sk[(lane + ATTN_SCORE_LANES * c) * ATTN_SCORE_STRIDE + i];
                }
#pragma unroll
                for (int r = 0; r < NR; ++r) {
                    const float4 qv = sq[(group * NR + r) * ATTN_SCORE_STRIDE + i];
#pragma unroll
                    for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                        x[r][c] += qv.x * kv[c].x + qv.y * kv[c].y + qv.z * kv[c].z + qv.w * kv[c].w;
                    }
                }
            }
        }

        attn_score_finish<NR>(a, key0, row0, seq, x);
    }
};

// --- kernels

// grid: parts of the keys, tiles of rows, KV heads and sequences
template <typename T>
static __global__ void __launch_bounds__(ATTN_SCORE_THREADS, ATTN_SCORE_RESIDENT)
        attn_score_rows(const attn_score_args a) {
    constexpr int NR = T::ROWS;

    __shared__ __align__(32) float4 sk[ATTN_SCORE_KEYS * ATTN_SCORE_STRIDE];
    __shared__ float4               sq[T::SHARED_Q];

    const int n_rows  = a.n_q * a.n_group;
    const int n_tiles = (a.n_kv + ATTN_SCORE_KEYS - 1) / ATTN_SCORE_KEYS;
    const int tile0   = (int) ((int64_t) n_tiles * blockIdx.x / a.n_split);
    const int tile1   = (int) ((int64_t) n_tiles * (blockIdx.x + 1) / a.n_split);
    const int row0    = blockIdx.y * ATTN_SCORE_GROUPS * NR;

    // each thread's own keys
    float row_max[NR];
    float row_sum[NR];
#pragma unroll
    for (int r = 0; r < NR; ++r) {
        row_max[r] = -INFINITY;
        row_sum[r] = 0.0f;
    }

    for (int tile = tile0; tile < tile1; ++tile) {
        float x[NR][ATTN_SCORE_COLS];
        T::tile(a, sk, sq, tile * ATTN_SCORE_KEYS, row0, blockIdx.z % a.n_head_kv, blockIdx.z / a.n_head_kv, x);

#pragma unroll
        for (int r = 0; r < NR; ++r) {
            float m = row_max[r];
#pragma unroll
            for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                m = fmaxf(m, x[r][c]);
            }
            if (m > -INFINITY) {
                float sum = row_sum[r] * expf(row_max[r] - m);
#pragma unroll
                for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                    sum += expf(x[r][c] - m);
                }
                row_max[r] = m;
                row_sum[r] = sum;
            }
        }
    }

#pragma unroll
    for (int r = 0; r < NR; ++r) {
#pragma unroll
        for (int offset = ATTN_SCORE_LANES / 2; offset > 0; offset /= 2) {
            const float other_max = __shfl_xor_sync(0xffffffffu, row_max[r], offset, ATTN_SCORE_LANES);
            const float other_sum = __shfl_xor_sync(0xffffffffu, row_sum[r], offset, ATTN_SCORE_LANES);
            const float m         = fmaxf(row_max[r], other_max);

            if (m > -INFINITY) {
                row_sum[r] = row_sum[r] * expf(row_max[r] - m) + other_sum * expf(other_max - m);
                row_max[r] = m;
            }
        }

        const int row = row0 + threadIdx.x / ATTN_SCORE_LANES * NR + r;
        if (threadIdx.x % ATTN_SCORE_LANES == 0 && row < n_rows) {
            a.part[((int64_t) blockIdx.z * n_rows + row) * a.n_split + blockIdx.x] =
                    make_float2(row_max[r], row_sum[r]);
        }
    }
}

// grid: rows of all heads and sequences, one per thread
static __global__ void __launch_bounds__(ATTN_SCORE_THREADS, ATTN_SCORE_RESIDENT)
        attn_score_combine(const attn_score_args a) {
    const int n_rows = a.n_q * a.n_group;
    const int all    = blockIdx.x * ATTN_SCORE_THREADS + threadIdx.x;
    if (all >= n_rows * a.n_head_kv * a.n_seq) {
        return;
    }

    const float2 * part = a.part + (int64_t) all * a.n_split;
    const int      row  = all % n_rows;
    const int      head = all / n_rows % a.n_head_kv * a.n_group + row / a.n_q;

    float m = -INFINITY;
    for (int i = 0; i < a.n_split; ++i) {
        m = fmaxf(m, part[i].x);
    }
    const float weight = a.weights ? a.weights[row % a.n_q] : 1.0f;
    if (m == -INFINITY || weight == 0.0f) { // every key is masked, or the query may hold anything
        a.stat[all] = make_float2(0.0f, 0.0f);
        return;
    }
    if (a.sinks) {
        m = fmaxf(m, a.sinks[head]);
    }

    float sum = a.sinks ? expf(a.sinks[head] - m) : 0.0f;
    for (int i = 0; i < a.n_split; ++i) {
        sum += part[i].y * expf(part[i].x - m);
    }
    a.stat[all] = make_float2(m, a.norm * weight / sum);
}

// grid: tiles of keys, KV heads, sequences
template <typename T>
static __global__ void __launch_bounds__(ATTN_SCORE_THREADS, ATTN_SCORE_RESIDENT)
        attn_score_columns(const attn_score_args a) {
    constexpr int NR = T::ROWS;

    __shared__ __align__(32) float4 sk[ATTN_SCORE_KEYS * ATTN_SCORE_STRIDE];
    __shared__ float4               sq[T::SHARED_Q];
    __shared__ float                sum[ATTN_SCORE_GROUPS * ATTN_SCORE_KEYS];

    const int lane   = threadIdx.x % ATTN_SCORE_LANES;
    const int group  = threadIdx.x / ATTN_SCORE_LANES;
    const int n_rows = a.n_q * a.n_group;
    const int key0   = blockIdx.x * ATTN_SCORE_KEYS;

    const float2 * stat = a.stat + ((int64_t) blockIdx.z * a.n_head_kv + blockIdx.y) * n_rows;

    float col[ATTN_SCORE_COLS] = { 0.0f };

    for (int row0 = 0; row0 < n_rows; row0 += ATTN_SCORE_GROUPS * NR) {
        float x[NR][ATTN_SCORE_COLS];
        T::tile(a, sk, sq, key0, row0, blockIdx.y, blockIdx.z, x);

#pragma unroll
        for (int r = 0; r < NR; ++r) {
            const int    row = row0 + group * NR + r;
            const float2 s   = row < n_rows ? stat[row] : make_float2(0.0f, 0.0f);
            if (s.y != 0.0f) {
#pragma unroll
                for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                    col[c] += s.y * expf(x[r][c] - s.x);
                }
            }
        }
    }

#pragma unroll
    for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
        sum[group * ATTN_SCORE_KEYS + lane + ATTN_SCORE_LANES * c] = col[c];
    }
    __syncthreads();

    const int key = key0 + threadIdx.x;
    if (threadIdx.x < ATTN_SCORE_KEYS && key < a.n_kv) {
        float total = 0.0f;
#pragma unroll
        for (int g = 0; g < ATTN_SCORE_GROUPS; ++g) {
            total += sum[g * ATTN_SCORE_KEYS + threadIdx.x];
        }
        if (a.acc) {
            total += ((const float *) (a.acc + blockIdx.z * a.nba2 + blockIdx.y * a.nba1))[key];
        }
        ((float *) (a.dst + blockIdx.z * a.nbd2 + blockIdx.y * a.nbd1))[key] = total;
    }
}

// --- host: the geometry of the grids, for every launcher

// float2 elements that part and stat need
static inline int64_t attn_score_n_stat(const attn_score_args & a) {
    return (int64_t) a.n_q * a.n_group * a.n_head_kv * a.n_seq;
}

static inline int64_t attn_score_n_part(const attn_score_args & a) {
    return attn_score_n_stat(a) * a.n_split;
}

// with few rows, a thread has one
static inline int attn_score_rows_per_thread(const attn_score_args & a) {
    return a.n_q * a.n_group <= ATTN_SCORE_GROUPS ? 1 : 4;
}

// to be set before memory is asked for; rows of a thread
static inline int attn_score_n_split(const attn_score_args & a, int rows) {
    const int n_rows  = ATTN_SCORE_GROUPS * rows;
    const int n_tiles = (a.n_kv + ATTN_SCORE_KEYS - 1) / ATTN_SCORE_KEYS;
    const int n_grid  = (a.n_q * a.n_group + n_rows - 1) / n_rows * a.n_head_kv * a.n_seq;
    const int n_split = ATTN_SCORE_BLOCKS / n_grid;
    return n_split < 1 ? 1 : n_split > n_tiles ? n_tiles : n_split;
}

// launch(kernel, grid, block, args)
template <typename T, typename launcher>
static void attn_score_launch_tiles(const attn_score_args & a, launcher && launch) {
    const int n_rows      = a.n_q * a.n_group;
    const int n_tiles     = (a.n_kv + ATTN_SCORE_KEYS - 1) / ATTN_SCORE_KEYS;
    const int n_row_tiles = (n_rows + ATTN_SCORE_GROUPS * T::ROWS - 1) / (ATTN_SCORE_GROUPS * T::ROWS);

    const dim3 block(ATTN_SCORE_THREADS);
    launch(attn_score_rows<T>, dim3(a.n_split, n_row_tiles, a.n_head_kv * a.n_seq), block, a);
    launch(attn_score_combine, dim3((unsigned) ((attn_score_n_stat(a) + ATTN_SCORE_THREADS - 1) / ATTN_SCORE_THREADS)),
            block, a);
    launch(attn_score_columns<T>, dim3(n_tiles, a.n_head_kv, a.n_seq), block, a);
}

template <typename K, typename launcher>
static void attn_score_launch(const attn_score_args & a, launcher && launch) {
    if (attn_score_rows_per_thread(a) == 1) {
        attn_score_launch_tiles<attn_score_plain<K, 1>>(a, launch);
    } else {
        attn_score_launch_tiles<attn_score_plain<K, 4>>(a, launch);
    }
}
