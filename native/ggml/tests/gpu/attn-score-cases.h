#pragma once

// Problems for the kernels of GGML_OP_ATTN_SCORE, and their answers in double precision. K is quantized and read back by
// ggml's own reference functions, so the layout of blocks is not our reading of it.
//
// All buffers are views with gaps. The gaps, keys that no row may see and queries of weight 0 are NaN, and each buffer
// ends with its last element: a read or write that goes astray is seen by its result or by the address sanitizer.

#include "ggml-quants.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

enum attn_score_mask { MASK_NONE, MASK_F16, MASK_F32 }; // numbers of attn_score_kargs as well

struct attn_score_case {
    ggml_type       type;
    int             d;
    int             n_kv;
    int             n_q;
    int             n_head_kv;
    int             n_group;
    int             n_seq;
    attn_score_mask mask;
    bool            sinks;
    bool            weights;
    bool            acc;
    float           logit_softcap;
    int             n_split = 2; // parts of the keys that CUDA's grid has
    float           q_size  = 1; // of queries and keys; their product does not change the logits
    float           k_size  = 1;

    std::string name() const {
        char buf[200];
        snprintf(buf, sizeof(buf),
                "%s d %d n_kv %d n_q %d n_head_kv %d n_group %d n_seq %d mask %d%s%s%s cap %g, q %g k %g",
                type == GGML_TYPE_F32    ? "f32"
                : type == GGML_TYPE_F16  ? "f16"
                : type == GGML_TYPE_BF16 ? "bf16"
                : type == GGML_TYPE_Q4_0 ? "q4_0"
                : type == GGML_TYPE_Q4_1 ? "q4_1"
                : type == GGML_TYPE_Q5_0 ? "q5_0"
                : type == GGML_TYPE_Q5_1 ? "q5_1"
                                         : "q8_0",
                d, n_kv, n_q, n_head_kv, n_group, n_seq, (int) mask, sinks ? " sinks" : "", weights ? " weights" : "",
                acc ? " acc" : "", logit_softcap, q_size, k_size);
        return buf;
    }
};

struct attn_score_problem {
    attn_score_case c;

    float scale;
    float norm = 0.25f;

    // strides in bytes, named as in ggml
    size_t nbq1, nbq2, nbq3;
    size_t nbk1, nbk2, nbk3;
    size_t nbm1, nbm3;
    size_t nbd1, nbd2;

    std::vector<char>   q, k, mask;
    std::vector<float>  sinks, weights;
    std::vector<float>  dst;  // what was there before, to be written
    std::vector<double> want; // as dst; NaN in the gaps
};

static inline uint16_t attn_score_to_half(float x) { // exact values only: 0, -INFINITY, multiples of 1/8
    if (x == 0.0f) {
        return 0;
    }
    if (std::isinf(x)) {
        return x < 0 ? 0xfc00 : 0x7c00;
    }
    int         e;
    const float m = frexpf(fabsf(x), &e);
    return (uint16_t) ((x < 0 ? 0x8000 : 0) | (e + 14) << 10 | ((int) (m * 2048) & 1023));
}

// writes x[d] as one row of K and reads back what it then holds
static inline void attn_score_store(ggml_type type, std::vector<float> & x, char * row) {
    const int64_t n = (int64_t) x.size();
    switch (type) {
        case GGML_TYPE_F32: memcpy(row, x.data(), 4 * n); break;
        case GGML_TYPE_F16:
            for (int64_t i = 0; i < n; ++i) {
                x[i]             = roundf(x[i] * 8) / 8;
                const uint16_t h = attn_score_to_half(x[i]);
                memcpy(row + 2 * i, &h, 2);
            }
            break;
        case GGML_TYPE_BF16:
            for (int64_t i = 0; i < n; ++i) {
                uint32_t bits;
                memcpy(&bits, &x[i], 4);
                bits &= 0xffff0000u;
                memcpy(&x[i], &bits, 4);
                memcpy(row + 2 * i, (const char *) &bits + 2, 2);
            }
            break;
        case GGML_TYPE_Q4_0:
            quantize_row_q4_0_ref(x.data(), (block_q4_0 *) row, n);
            dequantize_row_q4_0((const block_q4_0 *) row, x.data(), n);
            break;
        case GGML_TYPE_Q4_1:
            quantize_row_q4_1_ref(x.data(), (block_q4_1 *) row, n);
            dequantize_row_q4_1((const block_q4_1 *) row, x.data(), n);
            break;
        case GGML_TYPE_Q5_0:
            quantize_row_q5_0_ref(x.data(), (block_q5_0 *) row, n);
            dequantize_row_q5_0((const block_q5_0 *) row, x.data(), n);
            break;
        case GGML_TYPE_Q5_1:
            quantize_row_q5_1_ref(x.data(), (block_q5_1 *) row, n);
            dequantize_row_q5_1((const block_q5_1 *) row, x.data(), n);
            break;
        default:
            quantize_row_q8_0_ref(x.data(), (block_q8_0 *) row, n);
            dequantize_row_q8_0((const block_q8_0 *) row, x.data(), n);
            break;
    }
}

static inline size_t attn_score_row_size(ggml_type type, int d) {
    switch (type) {
        case GGML_TYPE_F32:  return 4 * d;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return 2 * d;
        case GGML_TYPE_Q4_0: return d / 32 * sizeof(block_q4_0);
        case GGML_TYPE_Q4_1: return d / 32 * sizeof(block_q4_1);
        case GGML_TYPE_Q5_0: return d / 32 * sizeof(block_q5_0);
        case GGML_TYPE_Q5_1: return d / 32 * sizeof(block_q5_1);
        default:             return d / 32 * sizeof(block_q8_0);
    }
}

static inline attn_score_problem attn_score_make(const attn_score_case & c, uint32_t seed) {
    attn_score_problem p;
    p.c     = c;
    p.scale = 3.0f / sqrtf((float) c.d) / c.q_size / c.k_size;

    const int    n_head = c.n_head_kv * c.n_group;
    const size_t row    = attn_score_row_size(c.type, c.d);

    // heads of a row side by side, as in a cache; a gap of 16 bytes or one block after each
    p.nbq2 = 4 * c.d + 16;
    p.nbq1 = n_head * p.nbq2;
    p.nbq3 = c.n_q * p.nbq1;
    p.nbk2 = row + (c.type == GGML_TYPE_F32 || c.d % 32 ? 16 : attn_score_row_size(c.type, 32));
    p.nbk1 = c.n_head_kv * p.nbk2;
    p.nbk3 = c.n_kv * p.nbk1;
    p.nbm1 = (c.mask == MASK_F16 ? 2 : 4) * (c.n_kv + 6);
    p.nbm3 = c.n_q * p.nbm1;
    p.nbd1 = 4 * (c.n_kv + 3);
    p.nbd2 = c.n_head_kv * p.nbd1;

    const auto nan = (char) 0xff; // of each type
    p.q.assign(p.nbq3 * c.n_seq - 16, nan);
    p.k.assign(p.nbk3 * c.n_seq - (p.nbk2 - row), nan);
    if (c.mask != MASK_NONE) {
        p.mask.assign(p.nbm3 * c.n_seq - (c.mask == MASK_F16 ? 12 : 24), nan);
    }
    p.dst.assign(p.nbd2 / 4 * c.n_seq - 3, NAN);
    p.want.assign(p.dst.size(), NAN);

    std::mt19937                    rng(seed);
    std::normal_distribution<float> normal;
    for (int h = 0; c.sinks && h < n_head; ++h) {
        p.sinks.push_back(2 * normal(rng));
    }
    for (int i = 0; c.weights && i < c.n_q; ++i) {
        p.weights.push_back(i % 3 == 1 ? 0.0f : 0.5f + i);
    }

    for (int s = 0; s < c.n_seq; ++s) {
        // causal, with a bias and holes; the first of several rows sees nothing
        std::vector<float> bias((size_t) c.n_q * c.n_kv, 0.0f);
        for (int i = 0; c.mask != MASK_NONE && i < c.n_q; ++i) {
            for (int j = 0; j < c.n_kv; ++j) {
                const bool seen = (i > 0 || c.n_q == 1) && j <= c.n_kv - 2 * c.n_q + i && (j + s) % 7 != 3;
                float &    b    = bias[(size_t) i * c.n_kv + j];
                b               = seen ? (float) ((i + j) % 5) / 8 : -INFINITY;

                char * m = p.mask.data() + s * p.nbm3 + i * p.nbm1;
                if (c.mask == MASK_F16) {
                    const uint16_t h = attn_score_to_half(b);
                    memcpy(m + 2 * j, &h, 2);
                } else {
                    memcpy(m + 4 * j, &b, 4);
                }
            }
        }

        for (int hk = 0; hk < c.n_head_kv; ++hk) {
            std::vector<std::vector<float>> k(c.n_kv, std::vector<float>(c.d));
            for (int j = 0; j < c.n_kv; ++j) {
                bool seen = false;
                for (int i = 0; i < c.n_q; ++i) {
                    seen = seen || bias[(size_t) i * c.n_kv + j] > -INFINITY;
                }
                for (int l = 0; l < c.d; ++l) {
                    // scales that differ from block to block
                    k[j][l] = normal(rng) * (c.k_size != 1 && l < 32 ? c.k_size / 16 : c.k_size);
                }
                if (seen) {
                    attn_score_store(c.type, k[j], p.k.data() + s * p.nbk3 + j * p.nbk1 + hk * p.nbk2);
                }
            }

            const size_t        d0 = s * p.nbd2 / 4 + hk * p.nbd1 / 4;
            std::vector<double> x(c.n_kv);
            for (int j = 0; j < c.n_kv; ++j) {
                p.dst[d0 + j]  = c.acc ? (float) (j % 11) / 16 : NAN;
                p.want[d0 + j] = c.acc ? p.dst[d0 + j] : 0;
            }
            for (int g = 0; g < c.n_group; ++g) {
                const int h = hk * c.n_group + g;
                for (int i = 0; i < c.n_q; ++i) {
                    std::vector<float> q(c.d);
                    for (auto & v : q) {
                        v = c.weights && p.weights[i] == 0 ? NAN : c.q_size * normal(rng);
                    }
                    memcpy(p.q.data() + s * p.nbq3 + h * p.nbq2 + i * p.nbq1, q.data(), 4 * c.d);

                    double max = -INFINITY;
                    for (int j = 0; j < c.n_kv; ++j) {
                        double dot = 0;
                        for (int l = 0; l < c.d; ++l) {
                            dot += (double) q[l] * k[j][l];
                        }
                        dot *= p.scale;
                        if (c.logit_softcap != 0) {
                            dot = c.logit_softcap * tanh(dot / c.logit_softcap);
                        }
                        x[j] = dot + bias[(size_t) i * c.n_kv + j];
                        max  = std::max(max, x[j]);
                    }
                    if (std::isinf(max) || (c.weights && p.weights[i] == 0)) {
                        continue;
                    }
                    double sum = c.sinks ? exp(p.sinks[h] - max) : 0;
                    for (int j = 0; j < c.n_kv; ++j) {
                        sum += exp(x[j] - max);
                    }
                    for (int j = 0; j < c.n_kv; ++j) {
                        p.want[d0 + j] += p.norm * (c.weights ? p.weights[i] : 1) * exp(x[j] - max) / sum;
                    }
                }
            }
        }
    }
    return p;
}

// largest error of got[], relative to each value; INFINITY where a gap was written or a value is missing
static inline double attn_score_error(const attn_score_problem & p, const std::vector<float> & got) {
    double res = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        if (std::isnan(p.want[i]) != std::isnan(got[i])) {
            return INFINITY;
        }
        if (!std::isnan(got[i])) {
            res = std::max(res, fabs(got[i] - p.want[i]) / (fabs(p.want[i]) + 1e-12));
        }
    }
    return res;
}

// of f32 logits of up to about 20, whose own rounding is the larger part
static constexpr double ATTN_SCORE_ERROR_MAX = 2e-5;

// every type, head size, group, kind of mask and option occurs, and sizes that no tile divides
static inline std::vector<attn_score_case> attn_score_cases() {
    return {
        { GGML_TYPE_F32, 64, 1, 1, 1, 1, 1, MASK_NONE, false, false, false, 0 },
        { GGML_TYPE_F32, 64, 130, 3, 2, 2, 1, MASK_NONE, false, false, false, 0 },
        { GGML_TYPE_F32, 80, 67, 8, 1, 8, 1, MASK_F32, false, true, false, 0 },
        { GGML_TYPE_F16, 80, 64, 1, 2, 7, 1, MASK_F32, true, false, true, 0 },
        { GGML_TYPE_F16, 128, 201, 10, 2, 4, 1, MASK_F16, false, false, false, 0 },
        { GGML_TYPE_F16, 256, 65, 9, 1, 1, 1, MASK_F16, false, true, true, 30 },
        { GGML_TYPE_F16, 64, 63, 3, 2, 3, 2, MASK_F16, true, true, true, 0 },
        { GGML_TYPE_BF16, 96, 129, 5, 1, 4, 2, MASK_F32, true, false, false, 5, 1 },
        { GGML_TYPE_BF16, 72, 90, 4, 2, 1, 1, MASK_F16, false, false, true, 0 },
        { GGML_TYPE_Q8_0, 128, 200, 12, 2, 4, 1, MASK_F16, true, true, true, 0 },
        { GGML_TYPE_Q8_0, 64, 77, 1, 2, 4, 2, MASK_NONE, false, false, false, 10, 1 },
        { GGML_TYPE_Q4_0, 64, 70, 9, 1, 2, 1, MASK_F32, false, false, false, 0 },
        { GGML_TYPE_Q4_1, 96, 66, 2, 2, 2, 1, MASK_NONE, true, false, false, 0 },
        { GGML_TYPE_Q5_0, 64, 71, 4, 1, 4, 1, MASK_F16, false, true, false, 0 },
        { GGML_TYPE_Q5_1, 128, 65, 3, 2, 1, 1, MASK_F32, false, false, true, 0 },
        // several tiles of rows and of keys per block, as with the rows of a micro-batch
        { GGML_TYPE_F16, 64, 150, 70, 1, 2, 1, MASK_F16, false, false, true, 0 },
        // beyond what a half holds, and below
        { GGML_TYPE_F16, 128, 70, 5, 1, 4, 1, MASK_F16, true, true, false, 0, 2, 7e4f },
        { GGML_TYPE_F16, 72, 66, 3, 2, 2, 1, MASK_NONE, false, false, false, 20, 2, 1e-6f },
        { GGML_TYPE_Q8_0, 64, 66, 5, 1, 2, 1, MASK_F16, false, false, false, 0, 2, 1e-5f, 1e5f },
        { GGML_TYPE_Q4_1, 64, 65, 3, 1, 4, 1, MASK_F32, false, false, false, 0, 2, 1e5f, 1e4f },
        { GGML_TYPE_Q5_0, 96, 66, 9, 1, 2, 1, MASK_NONE, false, false, false, 0, 2, 1e4f, 1e-4f },
    };
}

// few and small, for one OS thread per CUDA thread, and for each wrong kernel: several chunks of d, of which the last is
// not full, two tiles of keys, two tiles of rows; few rows, of which one sees nothing and has no sink; one query, behind which
// nothing may be read, below what a half holds, and keys beyond
static inline std::vector<attn_score_case> attn_score_cases_small() {
    return {
        { GGML_TYPE_F16, 72, 90, 9, 2, 4, 1, MASK_F16, true, true, true, 0 },
        { GGML_TYPE_Q8_0, 64, 70, 2, 1, 3, 2, MASK_F32, false, false, false, 6, 1 },
        { GGML_TYPE_Q8_0, 64, 66, 1, 1, 4, 2, MASK_NONE, false, false, false, 0, 2, 1e-6f, 1e5f },
    };
}
