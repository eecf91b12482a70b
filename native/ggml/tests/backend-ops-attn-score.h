#pragma once

// ATTN_SCORE in llama.cpp's tests/test-backend-ops.cpp, which includes this behind its test_case: every backend against the
// CPU's reference mode, which computes in double.
//
//   make test-backend-ops

#include "ggml-attn-score.h"

struct test_attn_score : public test_case {
    const ggml_type type_k;
    const int64_t   n_embd;
    const int64_t   n_q;
    const int64_t   n_kv;
    const int64_t   n_head_kv;
    const int64_t   n_group;
    const int64_t   n_seq;
    const ggml_type type_m; // GGML_TYPE_COUNT: no mask
    const bool      extra;  // sinks, weights, soft cap
    const bool      acc;

    std::string vars() override {
        return VARS_TO_STR10(type_k, n_embd, n_q, n_kv, n_head_kv, n_group, n_seq, type_m, extra, acc);
    }

    double max_nmse_err() override { return 1e-6; }

    uint64_t op_flops(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return 2 * n_embd * n_q * n_kv * n_head_kv * n_group * n_seq;
    }

    test_attn_score(ggml_type type_k, int64_t n_embd, int64_t n_q, int64_t n_kv, int64_t n_head_kv, int64_t n_group,
            int64_t n_seq, ggml_type type_m, bool extra, bool acc) :
        type_k(type_k), n_embd(n_embd), n_q(n_q), n_kv(n_kv), n_head_kv(n_head_kv), n_group(n_group), n_seq(n_seq),
        type_m(type_m), extra(extra), acc(acc) {}

    ggml_tensor * build_graph(ggml_context * ctx) override {
        // Q as a graph has it, K as the cache has it, with rows in front of the view
        ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, n_embd, n_head_kv * n_group, n_q, n_seq);
        ggml_tensor * k = ggml_new_tensor_3d(ctx, type_k, n_embd * n_head_kv, n_kv + 2, n_seq);
        ggml_set_name(q, "q");
        ggml_set_name(k, "k");

        q = ggml_permute(ctx, q, 0, 2, 1, 3);
        k = ggml_view_4d(
                ctx, k, n_embd, n_kv, n_head_kv, n_seq, k->nb[1], ggml_row_size(type_k, n_embd), k->nb[2], k->nb[1]);

        ggml_tensor * mask    = nullptr;
        ggml_tensor * sinks   = nullptr;
        ggml_tensor * weights = nullptr;
        ggml_tensor * sums    = nullptr;

        if (type_m != GGML_TYPE_COUNT) {
            mask = ggml_new_tensor_4d(ctx, type_m, n_kv, n_q, 1, n_seq);
            ggml_set_name(mask, "mask");
        }
        if (extra) {
            sinks   = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head_kv * n_group);
            weights = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_q);
            ggml_set_name(sinks, "sinks");
            ggml_set_name(weights, "weights");
        }
        if (acc) {
            sums = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_kv + 5, n_head_kv, n_seq);
            ggml_set_name(sums, "sums");
            sums = ggml_view_3d(ctx, sums, n_kv, n_head_kv, n_seq, sums->nb[1], sums->nb[2], 3 * sizeof(float));
        }

        ggml_tensor * out = ggml_attn_score(ctx, q, k, mask, sinks, weights, sums, 1.0f / sqrtf((float) n_embd),
                extra ? 3.0f : 0.0f, 1.0f / (n_q * n_group));
        ggml_set_name(out, "out");

        return out;
    }

    void initialize_tensors(ggml_context * ctx) override {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
            if (t->view_src) {
                continue;
            }
            if (strcmp(t->name, "mask") == 0 && t->type == GGML_TYPE_F16) {
                init_tensor_kq_mask(t);
            } else if (strcmp(t->name, "k") == 0) {
                // attention that is not flat
                init_tensor_uniform(t, -5.0f, 5.0f);
            } else {
                init_tensor_uniform(t);
            }
        }
    }
};

static const ggml_type attn_score_types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0,
    GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL };

static void add_attn_score_cases(std::vector<std::unique_ptr<test_case>> & cases) {
    for (ggml_type type : attn_score_types) {
        for (int n_embd : { 64, 80, 96, 128, 256 }) {
            if (n_embd % ggml_blck_size(type) == 0) {
                cases.emplace_back(new test_attn_score(type, n_embd, 32, 513, 2, 4, 1, GGML_TYPE_F16, false, false));
            }
        }
    }

    for (int n_group : { 1, 2, 4, 7, 8 }) {
        for (int n_kv : { 1, 63, 64, 65, 777 }) {
            for (ggml_type type_m : { GGML_TYPE_COUNT, GGML_TYPE_F16, GGML_TYPE_F32 }) {
                const int n_q = 1 + n_kv % 9;
                cases.emplace_back(new test_attn_score(
                        GGML_TYPE_F16, 64, n_q, n_kv, 2, n_group, 1 + n_group % 2, type_m, n_kv % 2, n_group % 2));
                cases.emplace_back(new test_attn_score(
                        GGML_TYPE_Q8_0, 128, n_q, n_kv, 3, n_group, 1, type_m, n_group % 2, n_kv % 2));
            }
        }
    }

    // a ubatch of H2O
    cases.emplace_back(new test_attn_score(GGML_TYPE_F16, 64, 512, 1024, 2, 7, 1, GGML_TYPE_F16, false, true));
}

static void add_attn_score_cases_perf(std::vector<std::unique_ptr<test_case>> & cases) {
    for (ggml_type type : attn_score_types) {
        for (int n_embd : { 64, 128 }) {
            for (int n_group : { 1, 4, 7 }) {
                cases.emplace_back(
                        new test_attn_score(type, n_embd, 32, 8192, 2, n_group, 1, GGML_TYPE_F16, false, false));
            }
        }
    }
}
