#include "attn-score-case.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

static const float f_inf = std::numeric_limits<float>::infinity();
static const float f_nan = std::numeric_limits<float>::quiet_NaN();

// rows before and behind what is used, and columns
static constexpr int64_t n_pad = 3;

std::string attn_score_case::text() const {
    static const char * masks[] = { "none", "causal", "holes", "far", "rows", "additive" };

    char res[256];
    snprintf(res, sizeof(res),
            "k %s, n_embd %d, n_q %d, n_kv %d, heads %d x %d, n_seq %d, mask %s %s%s%s%s, cap %g, norm %g",
            ggml_type_name(type_k), (int) n_embd, (int) n_q, (int) n_kv, (int) n_heads, (int) n_group, (int) n_seq,
            masks[mask], ggml_type_name(type_m), sinks ? ", sinks" : "", weights ? ", weights" : "", acc ? ", acc" : "",
            cap, norm);
    return res;
}

static std::vector<float> random_data(size_t n, float scale, std::mt19937 & rng) {
    std::normal_distribution<float> dist(0.0f, scale);

    std::vector<float> res(n);
    for (auto & x : res) {
        x = dist(rng);
    }
    return res;
}

// rows of `row` numbers, quantised, to where they lie in the tensor
static void set_rows(ggml_tensor * t, std::vector<uint8_t> & bytes, size_t offset, std::vector<float> & data,
        int64_t row, bool back) {
    std::vector<uint8_t> tmp(ggml_row_size(t->type, row));

    ggml_quantize_chunk(t->type, data.data(), tmp.data(), 0, 1, row, nullptr);
    if (t->type == GGML_TYPE_F32) {
        memcpy(tmp.data(), data.data(), tmp.size());
    }
    memcpy(bytes.data() + offset, tmp.data(), tmp.size());

    if (back && t->type != GGML_TYPE_F32) {
        ggml_get_type_traits(t->type)->to_float(tmp.data(), data.data(), row);
    }
}

static float mask_value(const attn_score_case & c, int64_t i, int64_t j, std::mt19937 & rng) {
    const bool causal = j <= c.n_kv - c.n_q + i;

    switch (c.mask) {
        case ATTN_SCORE_MASK_CAUSAL: return causal ? 0.0f : -f_inf;
        case ATTN_SCORE_MASK_HOLES:  return causal && j % 7 != 3 ? 0.0f : -f_inf;
        case ATTN_SCORE_MASK_FAR:    return j < std::max<int64_t>(1, c.n_kv / 3) ? 0.0f : -f_inf;
        case ATTN_SCORE_MASK_ROWS:   return causal && i % 3 != 1 ? 0.0f : -f_inf;
        // both types hold these
        case ATTN_SCORE_MASK_ADDITIVE: return (float) (rng() % 64) / 16.0f - 2.0f;
        default:                       return 0.0f;
    }
}

attn_score_data::attn_score_data(const attn_score_case & c, ggml_backend_t backend, uint32_t seed) :
    c(c), backend(backend) {
    std::mt19937 rng(seed);

    const int64_t n_head = c.n_heads * c.n_group;
    const int64_t n_pads = c.poison ? n_pad : 0;

    ctx.reset(ggml_init({ 32 * ggml_tensor_overhead(), nullptr, true }));

    // Q as it comes out of a graph, K as the cache holds it
    q_all = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, c.n_embd, n_head, c.n_q + 2 * n_pads, c.n_seq);
    k_all = ggml_new_tensor_3d(ctx.get(), c.type_k, c.n_embd * c.n_heads, c.n_kv + 2 * n_pads, c.n_seq);

    q = ggml_permute(ctx.get(),
            ggml_view_4d(ctx.get(), q_all, c.n_embd, n_head, c.n_q, c.n_seq, q_all->nb[1], q_all->nb[2], q_all->nb[3],
                    n_pads * q_all->nb[2]),
            0, 2, 1, 3);
    k = ggml_view_4d(ctx.get(), k_all, c.n_embd, c.n_kv, c.n_heads, c.n_seq, k_all->nb[1],
            ggml_row_size(c.type_k, c.n_embd), k_all->nb[2], n_pads * k_all->nb[1]);

    if (c.mask != ATTN_SCORE_MASK_NONE) {
        mask_all = ggml_new_tensor_4d(ctx.get(), c.type_m, c.n_kv + n_pads, c.n_q, 1, c.n_seq);
        mask     = ggml_view_4d(
                ctx.get(), mask_all, c.n_kv, c.n_q, 1, c.n_seq, mask_all->nb[1], mask_all->nb[2], mask_all->nb[3], 0);
    }
    if (c.sinks) {
        sinks = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_head);
    }
    if (c.weights) {
        weights = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, c.n_q);
    }
    if (c.acc) {
        sums_all = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, c.n_kv + 2 * n_pads, c.n_heads + 1, c.n_seq);
        acc      = ggml_view_3d(ctx.get(), sums_all, c.n_kv, c.n_heads, c.n_seq, sums_all->nb[1], sums_all->nb[2],
                n_pads * sizeof(float));
    }

    buf.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    GGML_ASSERT(buf);

    q_data = random_data(c.n_seq * c.n_q * n_head * c.n_embd, 1.0f, rng);
    k_data = random_data(
            c.n_seq * c.n_kv * c.n_heads * c.n_embd, c.peak / (std::fabs(c.scale) * std::sqrt((float) c.n_embd)), rng);

    if (c.weights) {
        weights_data = random_data(c.n_q, 1.0f, rng);
        for (int64_t i = 0; i < c.n_q; i += 3) {
            weights_data[i] = 0.0f;
        }
        ggml_backend_tensor_set(weights, weights_data.data(), 0, ggml_nbytes(weights));
    }

    {
        std::vector<float> all(ggml_nelements(q_all), f_nan);

        for (int64_t s = 0; s < c.n_seq; ++s) {
            for (int64_t i = 0; i < c.n_q; ++i) {
                float * row = q_data.data() + (s * c.n_q + i) * n_head * c.n_embd;

                if (c.weights && weights_data[i] == 0.0f) {
                    std::fill(row, row + n_head * c.n_embd, c.poison ? f_nan : 0.0f);
                }
                memcpy(all.data() + (s * q_all->ne[2] + n_pads + i) * n_head * c.n_embd, row,
                        n_head * c.n_embd * sizeof(float));
            }
        }
        ggml_backend_tensor_set(q_all, all.data(), 0, ggml_nbytes(q_all));
    }

    {
        // NaN in every type: the scale of a block is a half of which all bits are set
        std::vector<uint8_t> all(ggml_nbytes(k_all), 0xff);

        for (int64_t s = 0; s < c.n_seq; ++s) {
            for (int64_t j = 0; j < c.n_kv; ++j) {
                if (c.mask == ATTN_SCORE_MASK_HOLES && j % 7 == 3) {
                    continue;
                }
                const auto         begin = k_data.begin() + (s * c.n_kv + j) * c.n_heads * c.n_embd;
                std::vector<float> row(begin, begin + c.n_heads * c.n_embd);

                set_rows(k_all, all, s * k_all->nb[2] + (n_pads + j) * k_all->nb[1], row, row.size(), true);
                std::copy(row.begin(), row.end(), begin);
            }
        }
        ggml_backend_tensor_set(k_all, all.data(), 0, ggml_nbytes(k_all));
    }

    if (mask) {
        std::vector<uint8_t> all(ggml_nbytes(mask_all), 0xff);

        for (int64_t s = 0; s < c.n_seq; ++s) {
            for (int64_t i = 0; i < c.n_q; ++i) {
                for (int64_t j = 0; j < c.n_kv; ++j) {
                    const float x = mask_value(c, i, j, rng);
                    mask_data.push_back(x);

                    uint8_t * dst = all.data() + s * mask_all->nb[3] + i * mask_all->nb[1] + j * mask_all->nb[0];
                    if (c.type_m == GGML_TYPE_F16) {
                        const ggml_fp16_t y = ggml_fp32_to_fp16(x);
                        memcpy(dst, &y, sizeof(y));
                    } else {
                        memcpy(dst, &x, sizeof(x));
                    }
                }
            }
        }
        ggml_backend_tensor_set(mask_all, all.data(), 0, ggml_nbytes(mask_all));
    }

    if (c.sinks) {
        sinks_data = random_data(n_head, 2.0f, rng);
        ggml_backend_tensor_set(sinks, sinks_data.data(), 0, ggml_nbytes(sinks));
    }

    if (c.acc) {
        sums_data = random_data(ggml_nelements(sums_all), 1.0f, rng);
        ggml_backend_tensor_set(sums_all, sums_data.data(), 0, ggml_nbytes(sums_all));
    }
}

ggml_tensor * attn_score_data::build_op(ggml_context * ctx) const {
    return ggml_attn_score(ctx, q, k, mask, sinks, weights, acc, c.scale, c.cap, c.norm);
}

ggml_tensor * attn_score_data::build_graph(ggml_context * ctx) const {
    ggml_tensor * kf = ggml_cont(ctx, ggml_permute(ctx, k, 0, 2, 1, 3));
    if (kf->type != GGML_TYPE_F32) {
        kf = ggml_cast(ctx, kf, GGML_TYPE_F32);
    }
    kf = ggml_permute(ctx, kf, 0, 2, 1, 3);

    ggml_tensor * kq = ggml_mul_mat(ctx, kf, q); // [n_kv, n_q, n_head, n_seq]
    ggml_prec_set_acc(kq, GGML_PREC_F32);

    float scale = c.scale;
    if (c.cap != 0.0f) {
        kq    = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, scale / c.cap)), c.cap);
        scale = 1.0f;
    }

    // the operation wants a contiguous mask
    kq = ggml_soft_max_ext(ctx, kq, mask ? ggml_cont(ctx, mask) : nullptr, scale, 0.0f);
    if (sinks) {
        ggml_soft_max_add_sinks(kq, sinks);
    }

    if (weights) {
        kq = ggml_mul(ctx, kq, ggml_reshape_2d(ctx, weights, 1, c.n_q));
    }

    // sum over the rows and the heads of a group
    kq = ggml_reshape_4d(ctx, kq, c.n_kv, c.n_q * c.n_group, c.n_heads, c.n_seq);
    kq = ggml_sum_rows(ctx, ggml_cont(ctx, ggml_permute(ctx, kq, 1, 0, 2, 3)));
    kq = ggml_scale(ctx, ggml_reshape_3d(ctx, kq, c.n_kv, c.n_heads, c.n_seq), c.norm);

    return acc ? ggml_add(ctx, kq, acc) : kq;
}

std::vector<float> attn_score_data::run(bool fused) const {
    ggml_context_ptr ctx(ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));

    ggml_tensor * out = fused ? build_op(ctx.get()) : build_graph(ctx.get());
    ggml_cgraph * gf  = ggml_new_graph(ctx.get());

    ggml_build_forward_expand(gf, out);

    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        if (!ggml_backend_supports_op(backend, ggml_graph_node(gf, i))) {
            return {};
        }
    }

    ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

    if (acc) {
        ggml_backend_tensor_set(sums_all, sums_data.data(), 0, ggml_nbytes(sums_all));
    }

    if (ggml_backend_graph_compute(backend, gf) != GGML_STATUS_SUCCESS) {
        return {};
    }

    std::vector<float> res(c.n_kv * c.n_heads * c.n_seq);

    for (int64_t o = 0; o < c.n_heads * c.n_seq; ++o) {
        ggml_backend_tensor_get(out, res.data() + o * c.n_kv, o % c.n_heads * out->nb[1] + o / c.n_heads * out->nb[2],
                c.n_kv * sizeof(float));
    }
    return res;
}

std::vector<float> attn_score_data::reference() const {
    const int64_t n_head = c.n_heads * c.n_group;

    std::vector<float>  res(c.n_kv * c.n_heads * c.n_seq);
    std::vector<double> p(c.n_kv);
    std::vector<double> sum(c.n_kv);

    for (int64_t s = 0; s < c.n_seq; ++s) {
        for (int64_t h = 0; h < c.n_heads; ++h) {
            std::fill(sum.begin(), sum.end(), 0.0);

            for (int64_t g = h * c.n_group; g < (h + 1) * c.n_group; ++g) {
                for (int64_t i = 0; i < c.n_q; ++i) {
                    const double w = c.weights ? weights_data[i] : 1.0;
                    if (w == 0.0) {
                        continue;
                    }

                    double total = c.sinks ? std::exp((double) sinks_data[g]) : 0.0;

                    for (int64_t j = 0; j < c.n_kv; ++j) {
                        const double m = mask ? mask_data[(s * c.n_q + i) * c.n_kv + j] : 0.0;
                        p[j]           = 0.0;
                        if (m == -f_inf) {
                            continue;
                        }

                        double dot = 0.0;
                        for (int64_t e = 0; e < c.n_embd; ++e) {
                            dot += (double) q_data[((s * c.n_q + i) * n_head + g) * c.n_embd + e] *
                                   k_data[((s * c.n_kv + j) * c.n_heads + h) * c.n_embd + e];
                        }
                        dot *= c.scale;
                        if (c.cap != 0.0f) {
                            dot = c.cap * std::tanh(dot / c.cap);
                        }
                        // no overflow at the logits that are made here
                        p[j] = std::exp(dot + m);
                        total += p[j];
                    }

                    for (int64_t j = 0; j < c.n_kv && total > 0.0; ++j) {
                        sum[j] += w * p[j] / total;
                    }
                }
            }

            for (int64_t j = 0; j < c.n_kv; ++j) {
                const double before =
                        acc ? sums_data[(s * sums_all->ne[1] + h) * sums_all->ne[0] + (c.poison ? n_pad : 0) + j] : 0.0;
                res[(s * c.n_heads + h) * c.n_kv + j] = (float) (before + c.norm * sum[j]);
            }
        }
    }
    return res;
}

bool attn_score_data::damaged() const {
    if (!acc) {
        return false;
    }

    std::vector<float> now(sums_data.size());
    ggml_backend_tensor_get(sums_all, now.data(), 0, ggml_nbytes(sums_all));

    const int64_t n_pads = c.poison ? n_pad : 0;

    for (int64_t i = 0; i < (int64_t) now.size(); ++i) {
        const int64_t j = i % sums_all->ne[0];
        const int64_t h = i / sums_all->ne[0] % sums_all->ne[1];

        if ((j < n_pads || j >= n_pads + c.n_kv || h >= c.n_heads) && now[i] != sums_data[i]) {
            return true;
        }
    }
    return false;
}
