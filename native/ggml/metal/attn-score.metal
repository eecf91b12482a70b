// Metal kernels of GGML_OP_ATTN_SCORE: the attention that each key receives from given query rows, with no logits in
// memory. The same three passes as in ../cuda/attn-score-kernels.cuh, which tells more; here a threadgroup has four
// simdgroups, and a tile has 64 keys and 32 rows.

#include <metal_stdlib>

using namespace metal;

#include "attn-score-kargs.h"

#define FOR_UNROLL(x) _Pragma("clang loop unroll(full)") for (x)

#define ATTN_SCORE_LANES   16
#define ATTN_SCORE_GROUPS  (ATTN_SCORE_THREADS/ATTN_SCORE_LANES)
#define ATTN_SCORE_COLS    (ATTN_SCORE_KEYS/ATTN_SCORE_LANES)
#define ATTN_SCORE_NR      (ATTN_SCORE_ROWS/ATTN_SCORE_GROUPS)
#define ATTN_SCORE_CHUNK   8
#define ATTN_SCORE_STRIDE  (ATTN_SCORE_CHUNK + 1)

// the logit of what is masked. Not -INFINITY: fast math may take any comparison with it for false
#define ATTN_SCORE_NONE    (-1e30f)

// a chunk of the keys, one of the rows. The column sums use it once more
static_assert(ATTN_SCORE_SHARED == 16*(ATTN_SCORE_KEYS + ATTN_SCORE_ROWS)*ATTN_SCORE_STRIDE, "size of threadgroup memory");

// --- types of K: four dimensions of a row from i on, i a multiple of 4

static inline float attn_score_half(device const char * p) {
    return (float) *(device const half *) p;
}

struct attn_score_f32 {
    static float4 load(device const char * row, int i) {
        return *(device const float4 *) (row + 4*i);
    }
};

struct attn_score_f16 {
    static float4 load(device const char * row, int i) {
        device const half * x = (device const half *) (row + 2*i);
        return float4((float) x[0], (float) x[1], (float) x[2], (float) x[3]);
    }
};

// read as integers, so that it needs no bfloat in the language
struct attn_score_bf16 {
    static float4 load(device const char * row, int i) {
        device const ushort * x = (device const ushort *) (row + 2*i);
        return float4(as_type<float>((uint) x[0] << 16), as_type<float>((uint) x[1] << 16),
                as_type<float>((uint) x[2] << 16), as_type<float>((uint) x[3] << 16));
    }
};

struct attn_score_q8_0 {
    static float4 load(device const char * row, int i) {
        device const char * b = row + (i/32)*34;
        device const int8_t * x = (device const int8_t *) (b + 2 + i%32);
        const float d = attn_score_half(b);
        return float4(d*x[0], d*x[1], d*x[2], d*x[3]);
    }
};

// blocks of 32 with 4 bits per value, or 5 bits of which the highest lies apart: the first 16 values are the low nibbles
template <bool has_min, bool has_high>
struct attn_score_nibbles {
    static float4 load(device const char * row, int i) {
        const int n_scale = has_min ? 4 : 2;
        const int n_high  = has_high ? 4 : 0;

        device const char    * b = row + (i/32)*(n_scale + n_high + 16);
        device const uint8_t * x = (device const uint8_t *) (b + n_scale + n_high + i%16);

        const int   move = i%32 < 16 ? 0 : 4;
        const float d    = attn_score_half(b);
        const float base = has_min ? attn_score_half(b + 2) : -d*(has_high ? 16 : 8);
        const int   high = has_high ? ((device const uint8_t *) b)[n_scale + (i%32)/8] >> (i%8) : 0;

        return float4(
                d*(((x[0] >> move) & 15) | ((high >> 0 & 1) << 4)) + base,
                d*(((x[1] >> move) & 15) | ((high >> 1 & 1) << 4)) + base,
                d*(((x[2] >> move) & 15) | ((high >> 2 & 1) << 4)) + base,
                d*(((x[3] >> move) & 15) | ((high >> 3 & 1) << 4)) + base);
    }
};

typedef attn_score_nibbles<false, false> attn_score_q4_0;
typedef attn_score_nibbles<true,  false> attn_score_q4_1;
typedef attn_score_nibbles<false, true>  attn_score_q5_0;
typedef attn_score_nibbles<true,  true>  attn_score_q5_1;

// --- logits

// A masked key is out whatever its row of K holds: free cells may hold anything, NaN included.
static inline float attn_score_logit(
        constant attn_score_kargs & args, device const char * mask, float x, int row, int key, int seq) {
    float m = 0.0f;
    if (args.mask != 0) {
        device const char * p = mask + seq*args.nbm3 + (row%args.n_q)*args.nbm1;
        m = args.mask == 1 ? attn_score_half(p + 2*(uint64_t) key) : ((device const float *) p)[key];
        if (m <= (args.mask == 1 ? -MAXHALF : ATTN_SCORE_NONE)) {
            return ATTN_SCORE_NONE;
        }
    }
    x *= args.scale;
    if (args.logit_softcap != 0.0f) {
        x = args.logit_softcap*(1.0f - 2.0f/(1.0f + exp(2.0f*x/args.logit_softcap)));
    }
    return x + m;
}

// logits of the keys from key0 on and the rows from row0 on; x[r*COLS + c] belongs to row0 + NR*(thread/16) + r and
// key0 + thread%16 + 16*c. All threads take part.
template <typename K>
static inline void attn_score_tile(
        constant attn_score_kargs & args,
        device const char  * q,
        device const char  * k,
        device const char  * mask,
        threadgroup float4 * shared,
        int thread_id,
        int key0,
        int row0,
        int head_kv,
        int seq,
        thread float * x) {
    threadgroup float4 * sk = shared;
    threadgroup float4 * sq = shared + ATTN_SCORE_KEYS*ATTN_SCORE_STRIDE;

    const int lane   = thread_id%ATTN_SCORE_LANES;
    const int group  = thread_id/ATTN_SCORE_LANES;
    const int n_rows = args.n_q*args.n_group;

    k += seq*args.nbk3 + head_kv*args.nbk2;
    q += seq*args.nbq3 + (uint64_t) head_kv*args.n_group*args.nbq2;

    for (int i = 0; i < ATTN_SCORE_NR*ATTN_SCORE_COLS; ++i) {
        x[i] = 0.0f;
    }

    for (int i0 = 0; i0 < args.d; i0 += 4*ATTN_SCORE_CHUNK) {
        threadgroup_barrier(mem_flags::mem_threadgroup); // until the chunk before has been read

        for (int t = thread_id; t < ATTN_SCORE_KEYS*ATTN_SCORE_CHUNK; t += ATTN_SCORE_THREADS) {
            const int key = t/ATTN_SCORE_CHUNK;
            const int i   = i0 + 4*(t%ATTN_SCORE_CHUNK);

            sk[key*ATTN_SCORE_STRIDE + t%ATTN_SCORE_CHUNK] = key0 + key < args.n_kv && i < args.d
                ? K::load(k + (key0 + key)*args.nbk1, i) : float4(0.0f);
        }
        for (int t = thread_id; t < ATTN_SCORE_ROWS*ATTN_SCORE_CHUNK; t += ATTN_SCORE_THREADS) {
            const int row = row0 + t/ATTN_SCORE_CHUNK;
            const int i   = i0 + 4*(t%ATTN_SCORE_CHUNK);

            sq[t/ATTN_SCORE_CHUNK*ATTN_SCORE_STRIDE + t%ATTN_SCORE_CHUNK] = row < n_rows && i < args.d
                ? *(device const float4 *) (q + (row/args.n_q)*args.nbq2 + (row%args.n_q)*args.nbq1 + 4*i) : float4(0.0f);
        }

        threadgroup_barrier(mem_flags::mem_threadgroup); // until the chunk is there

        FOR_UNROLL (int i = 0; i < ATTN_SCORE_CHUNK; ++i) {
            float4 kv[ATTN_SCORE_COLS];
            FOR_UNROLL (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                kv[c] = sk[(lane + ATTN_SCORE_LANES*c)*ATTN_SCORE_STRIDE + i];
            }
            FOR_UNROLL (int r = 0; r < ATTN_SCORE_NR; ++r) {
                const float4 qv = sq[(group*ATTN_SCORE_NR + r)*ATTN_SCORE_STRIDE + i];
                FOR_UNROLL (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                    x[r*ATTN_SCORE_COLS + c] += dot(qv, kv[c]);
                }
            }
        }
    }

    for (int r = 0; r < ATTN_SCORE_NR; ++r) {
        const int row = row0 + group*ATTN_SCORE_NR + r;
        for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
            const int key = key0 + lane + ATTN_SCORE_LANES*c;
            x[r*ATTN_SCORE_COLS + c] = row < n_rows && key < args.n_kv
                ? attn_score_logit(args, mask, x[r*ATTN_SCORE_COLS + c], row, key, seq) : ATTN_SCORE_NONE;
        }
    }
}

// --- kernels

// grid: parts of the keys, tiles of rows, KV heads and sequences
template <typename K>
kernel void kernel_attn_score_rows(
        constant attn_score_kargs & args,
        device const char  * q,
        device const char  * k,
        device const char  * mask,
        device float2      * part,
        threadgroup float4 * shared [[threadgroup(0)]],
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    const int n_rows  = args.n_q*args.n_group;
    const int n_tiles = (args.n_kv + ATTN_SCORE_KEYS - 1)/ATTN_SCORE_KEYS;
    const int tile0   = (int) ((uint64_t) n_tiles*tgpig.x/args.n_split);
    const int tile1   = (int) ((uint64_t) n_tiles*(tgpig.x + 1)/args.n_split);
    const int row0    = tgpig.y*ATTN_SCORE_ROWS;

    // each thread's own keys
    float row_max[ATTN_SCORE_NR];
    float row_sum[ATTN_SCORE_NR];
    for (int r = 0; r < ATTN_SCORE_NR; ++r) {
        row_max[r] = ATTN_SCORE_NONE;
        row_sum[r] = 0.0f;
    }

    for (int tile = tile0; tile < tile1; ++tile) {
        float x[ATTN_SCORE_NR*ATTN_SCORE_COLS];
        attn_score_tile<K>(args, q, k, mask, shared, tiitg, tile*ATTN_SCORE_KEYS, row0,
                tgpig.z%args.n_head_kv, tgpig.z/args.n_head_kv, x);

        for (int r = 0; r < ATTN_SCORE_NR; ++r) {
            float m = row_max[r];
            for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                m = max(m, x[r*ATTN_SCORE_COLS + c]);
            }
            if (m > 0.5f*ATTN_SCORE_NONE) {
                float sum = row_sum[r]*exp(row_max[r] - m);
                for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                    sum += exp(x[r*ATTN_SCORE_COLS + c] - m);
                }
                row_max[r] = m;
                row_sum[r] = sum;
            }
        }
    }

    for (int r = 0; r < ATTN_SCORE_NR; ++r) {
        for (ushort offset = ATTN_SCORE_LANES/2; offset > 0; offset /= 2) {
            const float other_max = simd_shuffle_xor(row_max[r], offset);
            const float other_sum = simd_shuffle_xor(row_sum[r], offset);
            const float m         = max(row_max[r], other_max);

            if (m > 0.5f*ATTN_SCORE_NONE) {
                row_sum[r] = row_sum[r]*exp(row_max[r] - m) + other_sum*exp(other_max - m);
                row_max[r] = m;
            }
        }

        const int row = row0 + tiitg/ATTN_SCORE_LANES*ATTN_SCORE_NR + r;
        if (tiitg%ATTN_SCORE_LANES == 0 && row < n_rows) {
            part[((uint64_t) tgpig.z*n_rows + row)*args.n_split + tgpig.x] = float2(row_max[r], row_sum[r]);
        }
    }
}

// grid: rows of all heads and sequences, one per thread
kernel void kernel_attn_score_combine(
        constant attn_score_kargs & args,
        device const float2 * part,
        device const float  * sinks,
        device const float  * weights,
        device float2       * stat,
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    const int n_rows = args.n_q*args.n_group;
    const int all    = tgpig.x*ATTN_SCORE_THREADS + tiitg;
    if (all >= n_rows*args.n_head_kv*args.n_seq) {
        return;
    }

    const int row  = all%n_rows;
    const int head = all/n_rows%args.n_head_kv*args.n_group + row/args.n_q;

    part += (uint64_t) all*args.n_split;

    float m = ATTN_SCORE_NONE;
    for (int i = 0; i < args.n_split; ++i) {
        m = max(m, part[i].x);
    }
    const float weight = args.weights != 0 ? weights[row%args.n_q] : 1.0f;
    if (weight == 0.0f || m < 0.5f*ATTN_SCORE_NONE) { // the query may hold anything, or every key is masked
        stat[all] = float2(0.0f, 0.0f);
        return;
    }
    if (args.sinks != 0) {
        m = max(m, sinks[head]);
    }

    float sum = args.sinks != 0 ? exp(sinks[head] - m) : 0.0f;
    for (int i = 0; i < args.n_split; ++i) {
        sum += part[i].y*exp(part[i].x - m);
    }
    stat[all] = float2(m, args.norm*weight/sum);
}

// grid: tiles of keys, KV heads, sequences
template <typename K>
kernel void kernel_attn_score_columns(
        constant attn_score_kargs & args,
        device const char   * q,
        device const char   * k,
        device const char   * mask,
        device const float2 * stat,
        device char         * dst,
        threadgroup float4  * shared [[threadgroup(0)]],
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    const int lane   = tiitg%ATTN_SCORE_LANES;
    const int group  = tiitg/ATTN_SCORE_LANES;
    const int n_rows = args.n_q*args.n_group;
    const int key0   = tgpig.x*ATTN_SCORE_KEYS;

    stat += ((uint64_t) tgpig.z*args.n_head_kv + tgpig.y)*n_rows;

    float col[ATTN_SCORE_COLS];
    for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
        col[c] = 0.0f;
    }

    for (int row0 = 0; row0 < n_rows; row0 += ATTN_SCORE_ROWS) {
        float x[ATTN_SCORE_NR*ATTN_SCORE_COLS];
        attn_score_tile<K>(args, q, k, mask, shared, tiitg, key0, row0, tgpig.y, tgpig.z, x);

        for (int r = 0; r < ATTN_SCORE_NR; ++r) {
            const int    row = row0 + group*ATTN_SCORE_NR + r;
            const float2 s   = row < n_rows ? stat[row] : float2(0.0f, 0.0f);
            if (s.y != 0.0f) {
                for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
                    col[c] += s.y*exp(x[r*ATTN_SCORE_COLS + c] - s.x);
                }
            }
        }
    }

    threadgroup float * sum = (threadgroup float *) shared;

    threadgroup_barrier(mem_flags::mem_threadgroup); // until the last chunk has been read
    for (int c = 0; c < ATTN_SCORE_COLS; ++c) {
        sum[group*ATTN_SCORE_KEYS + lane + ATTN_SCORE_LANES*c] = col[c];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // until all sums are there

    const int key = key0 + tiitg;
    if (tiitg < ATTN_SCORE_KEYS && key < args.n_kv) {
        device float * out = (device float *) (dst + tgpig.z*args.nbd2 + tgpig.y*args.nbd1) + key;

        float total = args.acc != 0 ? *out : 0.0f;
        for (int g = 0; g < ATTN_SCORE_GROUPS; ++g) {
            total += sum[g*ATTN_SCORE_KEYS + tiitg];
        }
        *out = total;
    }
}

typedef decltype(kernel_attn_score_rows<attn_score_f32>)    kernel_attn_score_rows_t;
typedef decltype(kernel_attn_score_columns<attn_score_f32>) kernel_attn_score_columns_t;

template [[host_name("kernel_attn_score_rows_f32")]]  kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_f32>;
template [[host_name("kernel_attn_score_rows_f16")]]  kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_f16>;
template [[host_name("kernel_attn_score_rows_bf16")]] kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_bf16>;
template [[host_name("kernel_attn_score_rows_q8_0")]] kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_q8_0>;
template [[host_name("kernel_attn_score_rows_q4_0")]] kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_q4_0>;
template [[host_name("kernel_attn_score_rows_q4_1")]] kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_q4_1>;
template [[host_name("kernel_attn_score_rows_q5_0")]] kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_q5_0>;
template [[host_name("kernel_attn_score_rows_q5_1")]] kernel kernel_attn_score_rows_t kernel_attn_score_rows<attn_score_q5_1>;

template [[host_name("kernel_attn_score_columns_f32")]]  kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_f32>;
template [[host_name("kernel_attn_score_columns_f16")]]  kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_f16>;
template [[host_name("kernel_attn_score_columns_bf16")]] kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_bf16>;
template [[host_name("kernel_attn_score_columns_q8_0")]] kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_q8_0>;
template [[host_name("kernel_attn_score_columns_q4_0")]] kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_q4_0>;
template [[host_name("kernel_attn_score_columns_q4_1")]] kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_q4_1>;
template [[host_name("kernel_attn_score_columns_q5_0")]] kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_q5_0>;
template [[host_name("kernel_attn_score_columns_q5_1")]] kernel kernel_attn_score_columns_t kernel_attn_score_columns<attn_score_q5_1>;
