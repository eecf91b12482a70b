#pragma once

// Types of K, for the kernels of GGML_OP_ATTN_SCORE: load() gives four dimensions of a row, from i on, which is a multiple
// of 4. The bytes of blocks are counted here; attn-score.cu asserts that they are ggml's.

#ifndef CUDA_SHIM
#include <cuda_fp16.h>
#endif

#include <cstdint>

static __device__ __forceinline__ float attn_score_half(const char * p) {
    return __half2float(*(const half *) p);
}

struct attn_score_f32 {
    static __device__ __forceinline__ float4 load(const char * row, int i) { return *(const float4 *) (row + 4 * i); }
};

struct attn_score_f16 {
    static __device__ __forceinline__ float4 load(const char * row, int i) {
        const half2 * x = (const half2 *) (row + 2 * i);
        const float2  a = __half22float2(x[0]);
        const float2  b = __half22float2(x[1]);
        return make_float4(a.x, a.y, b.x, b.y);
    }
};

struct attn_score_bf16 {
    static __device__ __forceinline__ float4 load(const char * row, int i) {
        const uint2 x = *(const uint2 *) (row + 2 * i);
        return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
                __uint_as_float(x.y & 0xffff0000u));
    }
};

struct attn_score_q8_0 {
    static __device__ __forceinline__ float4 load(const char * row, int i) {
        const char *        b = row + (i / 32) * 34;
        const signed char * x = (const signed char *) b + 2 + i % 32;
        const float         d = attn_score_half(b);
        return make_float4(d * x[0], d * x[1], d * x[2], d * x[3]);
    }
};

// blocks of 32 with 4 bits per value, or 5 bits of which the highest lies apart: the first 16 values are the low nibbles
template <bool has_min, bool has_high>
struct attn_score_nibbles {
    static __device__ __forceinline__ float4 load(const char * row, int i) {
        constexpr int n_scale = has_min ? 4 : 2;
        constexpr int n_high  = has_high ? 4 : 0;

        const char *          b    = row + (i / 32) * (n_scale + n_high + 16);
        const unsigned char * x    = (const unsigned char *) b + n_scale + n_high + i % 16;
        const int             move = i % 32 < 16 ? 0 : 4;
        const float           d    = attn_score_half(b);
        const float           min  = has_min ? attn_score_half(b + 2) : -d * (has_high ? 16 : 8);

        int v[4];
        for (int j = 0; j < 4; ++j) {
            v[j] = (x[j] >> move) & 15;
        }
        if (has_high) {
            const int high = ((const unsigned char *) b)[n_scale + (i % 32) / 8] >> (i % 8);
            for (int j = 0; j < 4; ++j) {
                v[j] |= ((high >> j) & 1) << 4;
            }
        }
        return make_float4(d * v[0] + min, d * v[1] + min, d * v[2] + min, d * v[3] + min);
    }
};

typedef attn_score_nibbles<false, false> attn_score_q4_0;
typedef attn_score_nibbles<true, false>  attn_score_q4_1;
typedef attn_score_nibbles<false, true>  attn_score_q5_0;
typedef attn_score_nibbles<true, true>   attn_score_q5_1;
