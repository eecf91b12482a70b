// Scores of one layer before a cut: the operation ATTN_SCORE beside the graph that takes its place where a device does not
// have it. Time is the least of eight: CPU time, which a busy machine disturbs little, or with several threads wall-clock time.
// Transient memory is what graph and operation allocate beside K, Q and the result.
//
//   make bench-score

#include "ggml-attn-score.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <vector>

struct bench_case {
    ggml_type type_k;
    int64_t   n_embd;
    int64_t   n_head_kv;
    int64_t   n_group;
    int64_t   n_q;
    int64_t   n_kv;
};

struct bench_result {
    double ms    = INFINITY;
    size_t bytes = 0;

    std::vector<float> scores;
};

// as llama_dge::score_layer() builds it
static std::vector<ggml_tensor *> build_graph(ggml_context * ctx, const bench_case & c, ggml_tensor * q,
        ggml_tensor * k, ggml_tensor * rows, ggml_tensor * mask) {
    const int64_t block = 32ll * 1024 * 1024;
    const int64_t n_head =
            std::clamp<int64_t>(block / (4 * c.n_kv * (c.n_embd + 2 * c.n_q * c.n_group)), 1, c.n_head_kv);
    const int64_t n_q =
            n_head > 1 ? c.n_q : std::clamp<int64_t>((block / (4 * c.n_kv) - c.n_embd) / (2 * c.n_group), 1, c.n_q);

    std::vector<ggml_tensor *> res;

    for (int64_t h0 = 0; h0 < c.n_head_kv; h0 += n_head) {
        const int64_t nh = std::min(n_head, c.n_head_kv - h0);

        ggml_tensor * kf =
                ggml_view_2d(ctx, k, c.n_embd * nh, c.n_kv, k->nb[1], ggml_row_size(c.type_k, c.n_embd * h0));
        kf = ggml_get_rows(ctx, kf, rows);
        kf = ggml_view_3d(ctx, kf, c.n_embd, c.n_kv, nh, kf->nb[1], c.n_embd * sizeof(float), 0);

        for (int64_t q0 = 0; q0 < c.n_q; q0 += n_q) {
            const int64_t nq = std::min(n_q, c.n_q - q0);

            ggml_tensor * qv = ggml_view_3d(ctx, q, c.n_embd, nq, nh * c.n_group, q->nb[2], q->nb[1],
                    q0 * q->nb[2] + h0 * c.n_group * q->nb[1]);

            ggml_tensor * kq = ggml_mul_mat(ctx, kf, qv);
            ggml_prec_set_acc(kq, GGML_PREC_F32);

            kq = ggml_soft_max_ext(ctx, kq, ggml_view_2d(ctx, mask, c.n_kv, nq, mask->nb[1], q0 * mask->nb[1]),
                    1.0f / std::sqrt((float) c.n_embd), 0.0f);
            kq = ggml_reshape_3d(ctx, kq, c.n_kv, nq * c.n_group, nh);
            kq = ggml_pool_2d(ctx, kq, GGML_OP_POOL_AVG, 1, nq * c.n_group, 1, nq * c.n_group, 0, 0);

            ggml_set_output(kq);
            res.push_back(kq);
        }
    }
    return res;
}

static bench_result run(const bench_case & c, bool fused, int n_threads) {
    std::mt19937                    rng(1);
    std::normal_distribution<float> dist;

    ggml_backend_ptr backend(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend.get(), n_threads);

    const int64_t n_head = c.n_head_kv * c.n_group;

    ggml_context_ptr        ctx(ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor *           q    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, c.n_embd, n_head, c.n_q);
    ggml_tensor *           k    = ggml_new_tensor_2d(ctx.get(), c.type_k, c.n_embd * c.n_head_kv, c.n_kv);
    ggml_tensor *           rows = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, c.n_kv);
    ggml_tensor *           mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, c.n_kv, c.n_q);
    ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));

    {
        std::vector<float> data(ggml_nelements(k));
        for (auto & x : data) {
            x = dist(rng);
        }
        ggml_quantize_chunk(c.type_k, data.data(), k->data, 0, c.n_kv, k->ne[0], nullptr);

        for (int64_t i = 0; i < ggml_nelements(q); ++i) {
            ((float *) q->data)[i] = dist(rng);
        }
        for (int64_t j = 0; j < c.n_kv; ++j) {
            ((int32_t *) rows->data)[j] = j;
            for (int64_t i = 0; i < c.n_q; ++i) {
                ((float *) mask->data)[i * c.n_kv + j] = j <= c.n_kv - c.n_q + i ? 0.0f : -INFINITY;
            }
        }
    }

    ggml_context_ptr ctx_graph(ggml_init({ 4096 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    std::vector<ggml_tensor *> outs;

    if (fused) {
        ggml_tensor * kv = ggml_view_3d(
                ctx_graph.get(), k, c.n_embd, c.n_kv, c.n_head_kv, k->nb[1], ggml_row_size(c.type_k, c.n_embd), 0);
        outs.push_back(ggml_attn_score(ctx_graph.get(), ggml_permute(ctx_graph.get(), q, 0, 2, 1, 3), kv, mask, nullptr,
                nullptr, nullptr, 1.0f / std::sqrt((float) c.n_embd), 0.0f, 1.0f / (c.n_q * c.n_group)));
        ggml_set_output(outs.back());
    } else {
        outs = build_graph(ctx_graph.get(), c, q, k, rows, mask);
    }

    ggml_cgraph * gf = ggml_new_graph(ctx_graph.get());
    for (auto * out : outs) {
        ggml_build_forward_expand(gf, out);
    }

    ggml_gallocr_ptr galloc(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend.get())));
    ggml_gallocr_alloc_graph(galloc.get(), gf);

    bench_result res;

    res.bytes = ggml_gallocr_get_buffer_size(galloc.get(), 0) + ggml_graph_plan(gf, n_threads, nullptr).work_size -
                c.n_kv * c.n_head_kv * sizeof(float);

    for (int i = 0; i < 9; ++i) {
        const int64_t t0 = ggml_time_us();
        const clock_t c0 = clock();

        ggml_backend_graph_compute(backend.get(), gf);

        const double ms =
                n_threads == 1 ? 1e3 * (clock() - c0) / CLOCKS_PER_SEC : 1e-3 * (double) (ggml_time_us() - t0);
        // the first one warms up
        if (i > 0) {
            res.ms = std::min(res.ms, ms);
        }
    }

    for (auto * out : outs) {
        const float * data = (const float *) out->data;
        // blocks of query rows are averages of their own
        if ((int64_t) outs.size() <= c.n_head_kv) {
            res.scores.insert(res.scores.end(), data, data + ggml_nelements(out));
        }
    }
    return res;
}

int main(int argc, char ** argv) {
    const int64_t n_kv      = argc > 1 ? atoi(argv[1]) : 8192;
    const int64_t n_q       = argc > 2 ? atoi(argv[2]) : 32;
    const int     n_threads = argc > 3 ? atoi(argv[3]) : 1;

    ggml_time_init();

    printf("%d keys, %d queries, 2 KV heads, threads: %d\n\n", (int) n_kv, (int) n_q, n_threads);
    printf("| K | head size | group | graph ms | fused ms | graph / fused | graph MiB | fused MiB |\n");
    printf("| --- | --- | --- | --- | --- | --- | --- | --- |\n");

    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        for (int64_t n_embd : { 64, 128 }) {
            for (int64_t n_group : { 1, 4, 7 }) {
                const bench_case c = { type, n_embd, 2, n_group, n_q, n_kv };

                const auto graph = run(c, false, n_threads);
                const auto fused = run(c, true, n_threads);

                printf("| %s | %d | %d | %.1f | %.1f | %.2f | %.1f | %.2f |\n", ggml_type_name(type), (int) n_embd,
                        (int) n_group, graph.ms, fused.ms, graph.ms / fused.ms, graph.bytes / 1048576.0,
                        fused.bytes / 1048576.0);

                for (size_t i = 0; i < graph.scores.size(); ++i) {
                    if (!(std::fabs(graph.scores[i] - fused.scores[i]) <= 1e-4f * graph.scores[i] + 1e-9f)) {
                        fprintf(stderr, "score %zu differs: %g, %g\n", i, graph.scores[i], fused.scores[i]);
                        return 1;
                    }
                }
            }
        }
    }

    return 0;
}
