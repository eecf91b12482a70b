#pragma once

// Logits of GGML_OP_ATTN_SCORE by matrix units: products of halves, summed in f32. For K of f16, and for all types that
// are blocks of 32 with scales of their own.
//
// Rows whose scores are close must not change places, so nothing is rounded to a half: a number is the sum of two, high and
// low, of 22 bits. K of f16 is exact as it is. A query is multiplied by a power of two first, for its row's largest value
// to be just below 2^15, so that the high half cannot overflow, and the low one keeps its bits; a row of quantised K
// likewise, by the scales of its blocks. Products of two low halves are left out. Sums of products with a low half are
// apart until the end, because matrix units cut off what does not fit into a sum, and do not round.
//
// f32 and bf16 have a range that only a pass over each row of K could tell: they take attn_score_plain.

#include "attn-score-kernels.cuh"

#ifndef CUDA_SHIM
#include <mma.h>
#endif

// as ggml's TURING_MMA_AVAILABLE; the host's pass has to compile it, too
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
#define ATTN_SCORE_MMA_AVAILABLE
#endif

static constexpr int ATTN_SCORE_WARP  = 32;
static constexpr int ATTN_SCORE_WARPS = ATTN_SCORE_THREADS / ATTN_SCORE_WARP;

// m, n and k of a product
static constexpr int ATTN_SCORE_MMA = 16;

// what sk of the kernels has room for: rows of K in halves, then products of a row of queries in floats. Both strides
// have four or eight more than they need, to keep banks apart.
static constexpr int ATTN_SCORE_MMA_STRIDE_K = 8 * ATTN_SCORE_STRIDE;
static constexpr int ATTN_SCORE_MMA_STRIDE_X = ATTN_SCORE_KEYS + 4;

// the power of two that makes x at least 2^14 and less than 2^15, and its inverse
static __device__ __forceinline__ float2 attn_score_power(float x) {
    int e = (int) (__float_as_uint(x) >> 23) & 255;
    e     = e < 15 ? 15 : e > 254 ? 254 : e;
    return make_float2(__uint_as_float((unsigned) (268 - e) << 23), __uint_as_float((unsigned) (e - 14) << 23));
}

static __device__ __forceinline__ void attn_score_halves(float x, float y, half2 & high, half2 & low) {
    high           = __floats2half2_rn(x, y);
    const float2 h = __half22float2(high);
    low            = __floats2half2_rn(x - h.x, y - h.y);
}

// --- K in halves: four dimensions from i on, the high halves at high, low ones at high + LOW

struct attn_score_mma_f16 {
    static constexpr int LOW = 0; // has none

    static __device__ __forceinline__ float2 scale(const char *, int) { return make_float2(1.0f, 1.0f); }

    static __device__ __forceinline__ void store(half * high, const char * row, int i, float) {
        const half2 * x     = (const half2 *) (row + 2 * i);
        ((half2 *) high)[0] = x[0];
        ((half2 *) high)[1] = x[1];
    }
};

// n_byte: size of a block; its first halves are the scale and, where there is one, the minimum; values are up to max
template <typename K, int n_byte, int max, bool has_min>
struct attn_score_mma_blocks {
    static constexpr int LOW = 32;

    static __device__ __forceinline__ float2 scale(const char * row, int d) {
        float res = 0.0f;
        for (int i = 0; i < d / 32; ++i) {
            const char * b = row + i * n_byte;
            res = fmaxf(res, max * fabsf(attn_score_half(b)) + (has_min ? fabsf(attn_score_half(b + 2)) : 0.0f));
        }
        return attn_score_power(res);
    }

    static __device__ __forceinline__ void store(half * high, const char * row, int i, float s) {
        const float4 x = K::load(row, i);
        half2 *      h = (half2 *) high;
        half2 *      l = (half2 *) (high + LOW);
        attn_score_halves(s * x.x, s * x.y, h[0], l[0]);
        attn_score_halves(s * x.z, s * x.w, h[1], l[1]);
    }
};

typedef attn_score_mma_blocks<attn_score_q8_0, 34, 128, false> attn_score_mma_q8_0;
typedef attn_score_mma_blocks<attn_score_q4_0, 18, 8, false>   attn_score_mma_q4_0;
typedef attn_score_mma_blocks<attn_score_q4_1, 20, 15, true>   attn_score_mma_q4_1;
typedef attn_score_mma_blocks<attn_score_q5_0, 22, 16, false>  attn_score_mma_q5_0;
typedef attn_score_mma_blocks<attn_score_q5_1, 24, 31, true>   attn_score_mma_q5_1;

// --- logits, as attn_score_plain

template <typename K, int NR>
struct attn_score_mma {
    static constexpr bool SPLIT    = K::LOW > 0;
    static constexpr int  ROWS     = NR;
    static constexpr int  SHARED_Q = SPLIT ? ATTN_SCORE_KEYS / 2 : 1; // a float2 per key

    // dimensions in shared memory at a time: 64, or 32 with two halves each
    static constexpr int CHUNK = SPLIT ? K::LOW : 64;

    // products of 16 rows and 16 keys; a warp has N, beside each other
    static constexpr int N = ATTN_SCORE_GROUPS * NR / ATTN_SCORE_MMA;

    static_assert(N * ATTN_SCORE_KEYS == ATTN_SCORE_WARPS * N * ATTN_SCORE_MMA, "a warp has as many products as rows");
    static_assert(ATTN_SCORE_GROUPS * NR * ATTN_SCORE_MMA_STRIDE_X * sizeof(float) <=
                          ATTN_SCORE_KEYS * ATTN_SCORE_STRIDE * sizeof(float4),
            "products do not fit into sk");

    static __device__ __forceinline__ void tile(const attn_score_args & a, float4 * sk, float4 * sq, int key0, int row0,
            int head_kv, int seq, float (&x)[NR][ATTN_SCORE_COLS]) {
#ifdef ATTN_SCORE_MMA_AVAILABLE
        using namespace nvcuda;
        constexpr int M = ATTN_SCORE_MMA;

        typedef wmma::fragment<wmma::matrix_a, M, M, M, half, wmma::row_major> fragment_q;
        typedef wmma::fragment<wmma::matrix_b, M, M, M, half, wmma::col_major> fragment_k;
        typedef wmma::fragment<wmma::accumulator, M, M, M, float>              fragment_x;

        const int lane  = threadIdx.x % ATTN_SCORE_LANES;
        const int group = threadIdx.x / ATTN_SCORE_LANES;
        const int warp  = threadIdx.x / ATTN_SCORE_WARP;

        const int     warp_row = warp % N * M;
        const int     warp_key = warp / N * N * M;
        const int64_t pad0     = ((int64_t) seq * a.n_head_kv + head_kv) * a.n_rows_pad + row0;

        const char * k = a.k + seq * a.nbk3 + head_kv * a.nbk2;
        const half * q = a.q_half + (pad0 + warp_row) * 2 * a.d_pad;

        half *   keys  = (half *) sk;
        float *  res   = (float *) sk;
        float2 * scale = (float2 *) sq;

        fragment_x sum[N];
        fragment_x rest[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            wmma::fill_fragment(sum[j], 0.0f);
            wmma::fill_fragment(rest[j], 0.0f);
        }

        if (SPLIT) {
            __syncthreads(); // until the scales before have been read
            if (threadIdx.x < ATTN_SCORE_KEYS) {
                const int key      = key0 + threadIdx.x;
                scale[threadIdx.x] = key < a.n_kv ? K::scale(k + (int64_t) key * a.nbk1, a.d) : make_float2(1.0f, 1.0f);
            }
        }

        for (int i0 = 0; i0 < a.d; i0 += CHUNK) {
            __syncthreads(); // until the products or the chunk before have been read, and the scales are there

            for (int t = threadIdx.x; t < ATTN_SCORE_KEYS * CHUNK / 4; t += ATTN_SCORE_THREADS) {
                const int key = t / (CHUNK / 4);
                const int i   = t % (CHUNK / 4) * 4;

                half * p = keys + key * ATTN_SCORE_MMA_STRIDE_K + i;
                if (key0 + key < a.n_kv && i0 + i < a.d) {
                    K::store(p, k + (int64_t) (key0 + key) * a.nbk1, i0 + i, SPLIT ? scale[key].x : 1.0f);
                } else {
                    attn_score_halves(0.0f, 0.0f, ((half2 *) p)[0], ((half2 *) (p + K::LOW))[0]);
                    attn_score_halves(0.0f, 0.0f, ((half2 *) p)[1], ((half2 *) (p + K::LOW))[1]);
                }
            }

            __syncthreads(); // until the chunk is there

#pragma unroll
            for (int i = 0; i < CHUNK; i += M) {
                if (i0 + i >= a.d) {
                    break;
                }
                fragment_q q_high, q_low;
                wmma::load_matrix_sync(q_high, q + i0 + i, 2 * a.d_pad);
                wmma::load_matrix_sync(q_low, q + i0 + i + a.d_pad, 2 * a.d_pad);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const half * p = keys + (warp_key + j * M) * ATTN_SCORE_MMA_STRIDE_K + i;

                    fragment_k k_part;
                    wmma::load_matrix_sync(k_part, p, ATTN_SCORE_MMA_STRIDE_K);
                    wmma::mma_sync(sum[j], q_high, k_part, sum[j]);
                    wmma::mma_sync(rest[j], q_low, k_part, rest[j]);
                    if (SPLIT) {
                        wmma::load_matrix_sync(k_part, p + K::LOW, ATTN_SCORE_MMA_STRIDE_K);
                        wmma::mma_sync(rest[j], q_high, k_part, rest[j]);
                    }
                }
            }
        }

        __syncthreads(); // until the last chunk has been read

#pragma unroll
        for (int j = 0; j < N; ++j) {
            for (int t = 0; t < sum[j].num_elements; ++t) { // of the same place in both
                sum[j].x[t] += rest[j].x[t];
            }
            wmma::store_matrix_sync(res + warp_row * ATTN_SCORE_MMA_STRIDE_X + warp_key + j * M, sum[j],
                    ATTN_SCORE_MMA_STRIDE_X, wmma::mem_row_major);
        }

        __syncthreads(); // until the products are there

#pragma unroll
        for (int r = 0; r < NR; ++r) {
            const int   row     = group * NR + r;
            const float scale_q = a.q_scale[pad0 + row];
#pragma unroll
            for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                const int key = lane + ATTN_SCORE_LANES * c;
                x[r][c]       = res[row * ATTN_SCORE_MMA_STRIDE_X + key] * scale_q * (SPLIT ? scale[key].y : 1.0f);
            }
        }

        attn_score_finish<NR>(a, key0, row0, seq, x);
#else
        __trap(); // the launcher asks for the device first
#endif
    }
};

// --- queries in halves

// grid: rows of all heads and sequences, with what fills the last tile, one per warp
static __global__ void __launch_bounds__(ATTN_SCORE_THREADS, ATTN_SCORE_RESIDENT)
        attn_score_split(const attn_score_args a) {
    const int lane   = threadIdx.x % ATTN_SCORE_WARP;
    const int n_rows = a.n_q * a.n_group;
    const int all    = blockIdx.x * ATTN_SCORE_WARPS + threadIdx.x / ATTN_SCORE_WARP;
    if (all >= a.n_rows_pad * a.n_head_kv * a.n_seq) {
        return;
    }

    const int row     = all % a.n_rows_pad;
    const int head_kv = all / a.n_rows_pad % a.n_head_kv;
    const int seq     = all / a.n_rows_pad / a.n_head_kv;
    const int n       = row < n_rows ? a.d : 0;

    const float * q = (const float *) (a.q + seq * a.nbq3 + ((int64_t) head_kv * a.n_group + row / a.n_q) * a.nbq2 +
                                       (row % a.n_q) * a.nbq1);

    float max = 0.0f;
    for (int i = lane; i < n; i += ATTN_SCORE_WARP) {
        max = fmaxf(max, fabsf(q[i]));
    }
#pragma unroll
    for (int offset = ATTN_SCORE_WARP / 2; offset > 0; offset /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset, ATTN_SCORE_WARP));
    }

    const float2 scale = attn_score_power(max);

    half2 * high = (half2 *) (a.q_half + (int64_t) all * 2 * a.d_pad);
    half2 * low  = high + a.d_pad / 2;
    for (int i = lane; i < a.d_pad / 2; i += ATTN_SCORE_WARP) {
        const bool is_in = 2 * i < n;
        attn_score_halves(is_in ? scale.x * q[2 * i] : 0.0f, is_in ? scale.x * q[2 * i + 1] : 0.0f, high[i], low[i]);
    }
    if (lane == 0) {
        a.q_scale[all] = scale.y;
    }
}

// --- host

static inline int attn_score_mma_rows_per_thread(const attn_score_args & a) {
    return a.n_q * a.n_group <= 2 * ATTN_SCORE_GROUPS ? 2 : 4;
}

// to be set before memory is asked for
static inline void attn_score_mma_pad(attn_score_args & a) {
    const int n_tile = ATTN_SCORE_GROUPS * attn_score_mma_rows_per_thread(a);

    a.d_pad      = (a.d + ATTN_SCORE_MMA - 1) / ATTN_SCORE_MMA * ATTN_SCORE_MMA;
    a.n_rows_pad = (a.n_q * a.n_group + n_tile - 1) / n_tile * n_tile;
}

static inline int64_t attn_score_mma_n_rows(const attn_score_args & a) {
    return (int64_t) a.n_rows_pad * a.n_head_kv * a.n_seq;
}

template <typename K, typename launcher>
static void attn_score_mma_launch(const attn_score_args & a, launcher && launch) {
    const int64_t n_blocks = (attn_score_mma_n_rows(a) + ATTN_SCORE_WARPS - 1) / ATTN_SCORE_WARPS;
    launch(attn_score_split, dim3((unsigned) n_blocks), dim3(ATTN_SCORE_THREADS), a);
    if (attn_score_mma_rows_per_thread(a) == 2) {
        attn_score_launch_tiles<attn_score_mma<K, 2>>(a, launch);
    } else {
        attn_score_launch_tiles<attn_score_mma<K, 4>>(a, launch);
    }
}
