#include "attn-score.h"

#include "attn-score-ref.h"
#include "ggml-attn-score.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ops.h"
#include "simd-mappings.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// Two steps per block of query rows. First: logits of a chunk of keys, and exp(logit - maximum of the chunk) in their
// place, with maximum and sum kept per row and chunk. Then all threads know the softmax's denominator, and a chunk's
// columns are summed with one factor per row. A thread keeps its chunks in both steps, so one barrier per block is enough,
// and no sum depends on the number of threads.

static constexpr int64_t LLAMA_DGE_CHUNK = 256; // keys

// what the logits of a block take where it can be had: with 8192 keys 48 rows
static constexpr int64_t LLAMA_DGE_LOGITS_BYTES = 1536 * 1024;
static constexpr int64_t LLAMA_DGE_MIN_ROWS     = 24; // fewer would convert K too often

// rows and keys of one step of the product, in registers
#if defined(GGML_SIMD) && !defined(__ARM_FEATURE_SVE) && !defined(__riscv_v_intrinsic)
#define LLAMA_DGE_SIMD
#if defined(__AVX512F__) || defined(__ARM_NEON)
static constexpr int LLAMA_DGE_RM = 6;
static constexpr int LLAMA_DGE_RN = 64 / 4 / GGML_F32_EPR < 2 ? 2 : 64 / 4 / GGML_F32_EPR;
#else
static constexpr int LLAMA_DGE_RM = 6;
static constexpr int LLAMA_DGE_RN = 2;
#endif
static constexpr int LLAMA_DGE_STRIP = LLAMA_DGE_RN * GGML_F32_EPR;
#else
static constexpr int LLAMA_DGE_RM    = 4;
static constexpr int LLAMA_DGE_STRIP = 16;
#endif

static_assert(LLAMA_DGE_CHUNK % LLAMA_DGE_STRIP == 0, "a chunk is made of strips");

struct llama_dge_attn_score {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;
    const ggml_tensor * weights;

    float scale;
    float cap;
    float norm;

    int64_t n_embd;
    int64_t n_q;
    int64_t n_group;
    int64_t n_kv;
    int64_t n_head_kv;
    int64_t n_outer; // KV heads of all sequences
    int64_t n_chunk;

    // a block: rows of so many KV heads
    int64_t n_heads;
    int64_t n_rows;

    // floats in wdata
    size_t logits_size; // [n_heads][n_chunk][n_rows][LLAMA_DGE_CHUNK]
    size_t stats_size;  // [n_heads][n_rows][n_chunk] maximum and sum, twice: those of the last block may still be read
    size_t thread_size; // rows of K, a strip of K, a row of the mask, sums, what is known of the rows
    size_t index_size;  // rows that count
};

static llama_dge_attn_score llama_dge_attn_score_plan(const ggml_tensor * dst) {
    llama_dge_attn_score res;

    res.q       = dst->src[GGML_ATTN_SCORE_SRC_Q];
    res.k       = dst->src[GGML_ATTN_SCORE_SRC_K];
    res.mask    = dst->src[GGML_ATTN_SCORE_SRC_MASK];
    res.sinks   = dst->src[GGML_ATTN_SCORE_SRC_SINKS];
    res.weights = dst->src[GGML_ATTN_SCORE_SRC_WEIGHTS];

    res.scale = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_SCALE);
    res.cap   = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_SOFTCAP);
    res.norm  = ggml_get_op_params_f32(dst, GGML_ATTN_SCORE_PARAM_NORM);

    res.n_embd    = res.k->ne[0];
    res.n_q       = res.q->ne[1];
    res.n_kv      = res.k->ne[1];
    res.n_head_kv = res.k->ne[2];
    res.n_group   = res.q->ne[2] / res.n_head_kv;
    res.n_outer   = res.n_head_kv * res.k->ne[3];
    res.n_chunk   = (res.n_kv + LLAMA_DGE_CHUNK - 1) / LLAMA_DGE_CHUNK;

    const int64_t n_rows = res.n_q * res.n_group;
    const int64_t n_max =
            std::max(LLAMA_DGE_LOGITS_BYTES / (int64_t) (res.n_chunk * LLAMA_DGE_CHUNK * sizeof(float)) / 12 * 12,
                    LLAMA_DGE_MIN_ROWS);

    if (n_rows <= n_max) {
        res.n_heads = std::min(res.n_outer, n_max / n_rows);
        res.n_rows  = n_rows;
    } else {
        const int64_t n_parts = (n_rows + n_max - 1) / n_max;

        res.n_heads = 1;
        res.n_rows  = std::min(n_max, GGML_PAD((n_rows + n_parts - 1) / n_parts, LLAMA_DGE_RM));
    }

    const size_t line = CACHE_LINE_SIZE / sizeof(float);

    res.logits_size = GGML_PAD(res.n_heads * res.n_chunk * res.n_rows * LLAMA_DGE_CHUNK, line);
    res.stats_size  = GGML_PAD(res.n_heads * res.n_chunk * res.n_rows * 2, line);
    res.thread_size = GGML_PAD(2 * LLAMA_DGE_STRIP * res.n_embd + 2 * LLAMA_DGE_CHUNK + 2 * res.n_rows, line);
    res.index_size  = GGML_PAD(res.n_q, line);

    return res;
}

size_t ggml_attn_score_work_size(const ggml_tensor * dst, int n_tasks) {
    const auto plan = llama_dge_attn_score_plan(dst);

    return (plan.logits_size + 2 * plan.stats_size + n_tasks * (plan.thread_size + plan.index_size)) * sizeof(float);
}

// keys [j0, j0 + n) next to each other per dimension: [n_embd][LLAMA_DGE_STRIP], zeroes where there is no key
static void llama_dge_pack(const llama_dge_attn_score & p, const char * k, int64_t n, float * rows, float * strip) {
    const int64_t n_embd = p.n_embd;

    for (int64_t j = 0; j < n; ++j) {
        llama_dge_to_float(p.k->type, k + j * p.k->nb[1], rows + j * n_embd, n_embd);
    }
    memset(rows + n * n_embd, 0, (LLAMA_DGE_STRIP - n) * n_embd * sizeof(float));

    for (int64_t i = 0; i < n_embd; ++i) {
        for (int64_t j = 0; j < LLAMA_DGE_STRIP; ++j) {
            strip[i * LLAMA_DGE_STRIP + j] = rows[j * n_embd + i];
        }
    }
}

// products of RM query rows with the keys of a strip
template <int RM>
static void llama_dge_product(const float * const * q, const float * strip, int64_t n_embd, float * out) {
#ifdef LLAMA_DGE_SIMD
    GGML_F32_VEC acc[RM][LLAMA_DGE_RN];

    for (int r = 0; r < RM; ++r) {
        for (int c = 0; c < LLAMA_DGE_RN; ++c) {
            acc[r][c] = GGML_F32_VEC_ZERO;
        }
    }

    for (int64_t i = 0; i < n_embd; ++i) {
        GGML_F32_VEC x[LLAMA_DGE_RN];
        for (int c = 0; c < LLAMA_DGE_RN; ++c) {
            x[c] = GGML_F32_VEC_LOAD(strip + i * LLAMA_DGE_STRIP + c * GGML_F32_EPR);
        }
        for (int r = 0; r < RM; ++r) {
            const GGML_F32_VEC y = GGML_F32_VEC_SET1(q[r][i]);
            for (int c = 0; c < LLAMA_DGE_RN; ++c) {
                acc[r][c] = GGML_F32_VEC_FMA(acc[r][c], x[c], y);
            }
        }
    }

    for (int r = 0; r < RM; ++r) {
        for (int c = 0; c < LLAMA_DGE_RN; ++c) {
            GGML_F32_VEC_STORE(out + r * LLAMA_DGE_CHUNK + c * GGML_F32_EPR, acc[r][c]);
        }
    }
#else
    float acc[RM][LLAMA_DGE_STRIP] = {};

    for (int64_t i = 0; i < n_embd; ++i) {
        for (int r = 0; r < RM; ++r) {
            for (int c = 0; c < LLAMA_DGE_STRIP; ++c) {
                acc[r][c] += q[r][i] * strip[i * LLAMA_DGE_STRIP + c];
            }
        }
    }

    for (int r = 0; r < RM; ++r) {
        memcpy(out + r * LLAMA_DGE_CHUNK, acc[r], sizeof(acc[r]));
    }
#endif
}

static void llama_dge_product_rest(
        const float * const * q, const float * strip, int64_t n_embd, float * out, int64_t n_rows) {
    switch (n_rows) {
        case 1:  llama_dge_product<1>(q, strip, n_embd, out); break;
        case 2:  llama_dge_product<2>(q, strip, n_embd, out); break;
        case 3:  llama_dge_product<3>(q, strip, n_embd, out); break;
        case 4:  llama_dge_product<4>(q, strip, n_embd, out); break;
        case 5:  llama_dge_product<5>(q, strip, n_embd, out); break;
        default: break;
    }
}

static const char * llama_dge_mask_row(const llama_dge_attn_score & p, int64_t i, int64_t s, int64_t j0) {
    return (const char *) p.mask->data + j0 * p.mask->nb[0] + i * p.mask->nb[1] + s * p.mask->nb[3];
}

static bool llama_dge_is_masked(ggml_type type, const char * row, int64_t j) {
    return type == GGML_TYPE_F16 ? ((const ggml_fp16_t *) row)[j] == 0xfc00 : ((const float *) row)[j] == -INFINITY;
}

// keys of a chunk that a row may attend to lie in [j0, j1)
static void llama_dge_extend(ggml_type type, const char * row, int64_t n, int64_t & j0, int64_t & j1) {
    for (int64_t j = 0; j < j0; ++j) {
        if (!llama_dge_is_masked(type, row, j)) {
            j0 = j;
        }
    }
    for (int64_t j = n - 1; j >= j1; --j) {
        if (!llama_dge_is_masked(type, row, j)) {
            j1 = j + 1;
        }
    }
}

// scale, cap and mask in place; the maximum
static float llama_dge_finish(float * x, const float * mask, int64_t n, float scale, float cap) {
    if (cap != 0.0f) {
        for (int64_t j = 0; j < n; ++j) {
            x[j] = cap * tanhf(x[j] * (scale / cap));
        }
        scale = 1.0f;
    }

    // lanes, so that it needs no permission to reorder
    float   m[16];
    int64_t j = 0;
    std::fill(m, m + 16, -INFINITY);

    for (; j + 16 <= n; j += 16) {
        for (int l = 0; l < 16; ++l) {
            const float y = mask[j + l] == -INFINITY ? -INFINITY : x[j + l] * scale + mask[j + l];
            x[j + l]      = y;
            m[l]          = y > m[l] ? y : m[l];
        }
    }
    for (; j < n; ++j) {
        x[j] = mask[j] == -INFINITY ? -INFINITY : x[j] * scale + mask[j];
        m[0] = std::max(m[0], x[j]);
    }

    return *std::max_element(m, m + 16);
}

// one block: rows [r0, r0 + n_rows) of KV heads [o0, o0 + n_heads), by index among the rows that count
struct llama_dge_attn_score_block {
    int64_t o0;
    int64_t n_heads;
    int64_t r0;
    int64_t n_rows;

    float * logits;
    float * stats;
};

struct llama_dge_attn_score_thread {
    float * rows;
    float * strip;
    float * mask; // [LLAMA_DGE_CHUNK]
    float * sums; // [LLAMA_DGE_CHUNK]
    float * row_max;
    float * row_factor;

    int32_t * index; // query rows that count
    int64_t   n_index;
};

// a row of the block: query i of head g
static void llama_dge_get_row(const llama_dge_attn_score & p, const llama_dge_attn_score_thread & t, int64_t o,
        int64_t r, int64_t & i, int64_t & g) {
    i = t.index[r / p.n_group];
    g = o % p.n_head_kv * p.n_group + r % p.n_group;
}

static void llama_dge_logits(const llama_dge_attn_score & p, const llama_dge_attn_score_block & b,
        const llama_dge_attn_score_thread & t, int64_t io, int64_t c) {
    const int64_t o  = b.o0 + io;
    const int64_t h  = o % p.n_head_kv;
    const int64_t s  = o / p.n_head_kv;
    const int64_t j0 = c * LLAMA_DGE_CHUNK;
    const int64_t n  = std::min(LLAMA_DGE_CHUNK, p.n_kv - j0);

    float * logits = b.logits + (io * p.n_chunk + c) * p.n_rows * LLAMA_DGE_CHUNK;
    float * stats  = b.stats + (io * p.n_rows * p.n_chunk + c) * 2;

    int64_t i;
    int64_t g;

    // what no row attends to is not read
    int64_t begin = p.mask ? n : 0;
    int64_t end   = p.mask ? 0 : n;

    for (int64_t r = 0; p.mask && r < b.n_rows && (begin > 0 || end < n); r += p.n_group - (b.r0 + r) % p.n_group) {
        llama_dge_get_row(p, t, o, b.r0 + r, i, g);
        llama_dge_extend(p.mask->type, llama_dge_mask_row(p, i, s, j0), n, begin, end);
    }

    for (int64_t j = begin / LLAMA_DGE_STRIP * LLAMA_DGE_STRIP; j < end; j += LLAMA_DGE_STRIP) {
        const char * k = (const char *) p.k->data + (j0 + j) * p.k->nb[1] + h * p.k->nb[2] + s * p.k->nb[3];

        llama_dge_pack(p, k, std::min<int64_t>(LLAMA_DGE_STRIP, n - j), t.rows, t.strip);

        for (int64_t r = 0; r < b.n_rows; r += LLAMA_DGE_RM) {
            const int64_t nr = std::min<int64_t>(LLAMA_DGE_RM, b.n_rows - r);

            const float * q[LLAMA_DGE_RM];
            for (int64_t l = 0; l < nr; ++l) {
                llama_dge_get_row(p, t, o, b.r0 + r + l, i, g);
                q[l] = (const float *) ((const char *) p.q->data + i * p.q->nb[1] + g * p.q->nb[2] + s * p.q->nb[3]);
            }

            float * out = logits + r * LLAMA_DGE_CHUNK + j;

            if (nr == LLAMA_DGE_RM) {
                llama_dge_product<LLAMA_DGE_RM>(q, t.strip, p.n_embd, out);
            } else {
                llama_dge_product_rest(q, t.strip, p.n_embd, out, nr);
            }
        }
    }

    int64_t i_mask = -1;

    for (int64_t r = 0; r < b.n_rows; ++r) {
        llama_dge_get_row(p, t, o, b.r0 + r, i, g);

        // heads of a group share it
        if (p.mask && i != i_mask && begin < end) {
            llama_dge_to_float(p.mask->type, llama_dge_mask_row(p, i, s, j0), t.mask, n);
            i_mask = i;
        }

        float * x = logits + r * LLAMA_DGE_CHUNK;
        float   m = -INFINITY;
        float   d = 0.0f;

        if (begin < end) {
            m = llama_dge_finish(x, t.mask, n, p.scale, p.cap);
        }
        if (m != -INFINITY) {
            d = (float) ggml_vec_soft_max_f32(n, x, x, m);
        }

        stats[r * p.n_chunk * 2]     = m;
        stats[r * p.n_chunk * 2 + 1] = d;
    }
}

// denominators of the rows of a head: what exponentials of a chunk with the maximum x have to be multiplied with is
// exp(x - t.row_max) * t.row_factor
static void llama_dge_totals(const llama_dge_attn_score & p, const llama_dge_attn_score_block & b,
        const llama_dge_attn_score_thread & t, int64_t io) {
    for (int64_t r = 0; r < b.n_rows; ++r) {
        const float * stats = b.stats + (io * p.n_rows + r) * p.n_chunk * 2;

        int64_t i;
        int64_t g;
        llama_dge_get_row(p, t, b.o0 + io, b.r0 + r, i, g);

        const float sink = p.sinks ? ((const float *) p.sinks->data)[g] : -INFINITY;

        float m = sink;
        for (int64_t c = 0; c < p.n_chunk; ++c) {
            m = std::max(m, stats[c * 2]);
        }

        double total = sink != -INFINITY ? expf(sink - m) : 0.0f;
        for (int64_t c = 0; c < p.n_chunk; ++c) {
            if (stats[c * 2] != -INFINITY) {
                total += stats[c * 2 + 1] * expf(stats[c * 2] - m);
            }
        }

        t.row_max[r]    = m;
        t.row_factor[r] = p.norm * (p.weights ? ((const float *) p.weights->data)[i] : 1.0f) / (float) total;
    }
}

static void llama_dge_sum(const llama_dge_attn_score & p, const llama_dge_attn_score_block & b,
        const llama_dge_attn_score_thread & t, int64_t io, int64_t c, ggml_tensor * dst, bool accumulate) {
    const int64_t o  = b.o0 + io;
    const int64_t j0 = c * LLAMA_DGE_CHUNK;
    const int64_t n  = std::min(LLAMA_DGE_CHUNK, p.n_kv - j0);

    const float * logits = b.logits + (io * p.n_chunk + c) * p.n_rows * LLAMA_DGE_CHUNK;

    memset(t.sums, 0, n * sizeof(float));

    for (int64_t r = 0; r < b.n_rows; ++r) {
        const float m = b.stats[((io * p.n_rows + r) * p.n_chunk + c) * 2];

        if (m != -INFINITY) {
            ggml_vec_mad_f32(n, t.sums, logits + r * LLAMA_DGE_CHUNK, expf(m - t.row_max[r]) * t.row_factor[r]);
        }
    }

    float * out = (float *) ((char *) dst->data + o % p.n_head_kv * dst->nb[1] + o / p.n_head_kv * dst->nb[2]) + j0;

    if (accumulate) {
        ggml_vec_add_f32(n, out, out, t.sums);
    } else {
        memcpy(out, t.sums, n * sizeof(float));
    }
}

void ggml_compute_forward_attn_score(const ggml_compute_params * params, ggml_tensor * dst) {
    const auto p = llama_dge_attn_score_plan(dst);

    const int ith = params->ith;
    const int nth = params->nth;

    if (params->use_ref) {
        llama_dge_attn_score_ref(dst, ith, nth);
        return;
    }

    const bool has_acc = dst->src[GGML_ATTN_SCORE_SRC_ACC] != nullptr;

    float * logits = (float *) params->wdata;
    float * stats  = logits + p.logits_size;
    float * own    = stats + 2 * p.stats_size + ith * (p.thread_size + p.index_size);

    llama_dge_attn_score_thread t;

    t.rows       = own;
    t.strip      = t.rows + LLAMA_DGE_STRIP * p.n_embd;
    t.mask       = t.strip + LLAMA_DGE_STRIP * p.n_embd;
    t.sums       = t.mask + LLAMA_DGE_CHUNK;
    t.row_max    = t.sums + LLAMA_DGE_CHUNK;
    t.row_factor = t.row_max + p.n_rows;
    t.index      = (int32_t *) (own + p.thread_size);
    t.n_index    = 0;

    GGML_ASSERT(((char *) params->wdata + params->wsize) >=
                (char *) (stats + 2 * p.stats_size + nth * (p.thread_size + p.index_size)));

    memset(t.mask, 0, LLAMA_DGE_CHUNK * sizeof(float));

    for (int64_t i = 0; i < p.n_q; ++i) {
        if (!p.weights || ((const float *) p.weights->data)[i] != 0.0f) {
            t.index[t.n_index++] = i;
        }
    }

    const int64_t n_rows = t.n_index * p.n_group;

    llama_dge_attn_score_block b;

    b.logits = logits;
    b.stats  = stats;

    for (b.o0 = 0; b.o0 < p.n_outer; b.o0 += p.n_heads) {
        b.n_heads = std::min(p.n_heads, p.n_outer - b.o0);
        b.r0      = 0;

        const int64_t n_tasks = b.n_heads * p.n_chunk;

        // once even without rows: zeroes are a result, too
        do {
            b.n_rows = std::min(p.n_rows, n_rows - b.r0);

            for (int64_t task = ith; task < n_tasks; task += nth) {
                llama_dge_logits(p, b, t, task / p.n_chunk, task % p.n_chunk);
            }

            ggml_barrier(params->threadpool);

            int64_t io_totals = -1;

            for (int64_t task = ith; task < n_tasks; task += nth) {
                const int64_t io = task / p.n_chunk;

                if (io != io_totals) {
                    llama_dge_totals(p, b, t, io);
                    io_totals = io;
                }

                llama_dge_sum(p, b, t, io, task % p.n_chunk, dst, has_acc || b.r0 > 0);
            }

            b.stats = b.stats == stats ? stats + p.stats_size : stats;
            b.r0 += p.n_rows;
        } while (b.r0 < n_rows);
    }
}
