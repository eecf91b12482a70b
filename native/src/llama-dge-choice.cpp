#include "llama-dge-choice.h"

#include "llama-dge-graph.h"

#include "llama-hparams.h"

#include <cmath>
#include <cstring>
#include <new>

llama_dge_scratch_ptr llama_dge_new_scratch() {
    llama_dge_scratch_ptr res(new llama_dge_scratch);

    res->backend.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!res->backend) {
        return nullptr;
    }

    res->galloc.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(res->backend.get())));
    res->meta.resize(16 * ggml_tensor_overhead() + ggml_graph_overhead());

    return res;
}

llama_dge_choice::llama_dge_choice(const llama_hparams & hparams) : hparams(hparams), fused(llama_dge_use_fused()) {}

llama_dge_choice::~llama_dge_choice() {
    cancel = true;
    wait();
}

void llama_dge_choice::start() {
    thread = std::thread([this] { run(); });
}

void llama_dge_choice::wait() {
    if (thread.joinable()) {
        thread.join();
    }
}

int32_t llama_dge_choice::compute(ggml_context * ctx, ggml_tensor * out) {
    ggml_set_output(out);

    auto * gf = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, out);

    if (llama_dge_alloc_fails() || !ggml_gallocr_alloc_graph(scorer->galloc.get(), gf)) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    const auto res = ggml_backend_graph_compute(scorer->backend.get(), gf);
    if (res != GGML_STATUS_SUCCESS) {
        return res == GGML_STATUS_ABORTED ? LLAMA_DGE_ERR_ABORTED : LLAMA_DGE_ERR_COMPUTE;
    }

    return LLAMA_DGE_OK;
}

int32_t llama_dge_choice::score(size_t i, int32_t n, std::vector<float> & scores) {
    GGML_ASSERT(n <= n_q);

    return fused ? score_fused(i, n, scores) : score_graph(i, n, scores);
}

int32_t llama_dge_choice::score_fused(size_t i, int32_t n, std::vector<float> & scores) {
    const auto & layer = layers[i];
    const auto & rows  = parked->layers[i];

    ggml_context_ptr ctx(ggml_init({ scorer->meta.size(), scorer->meta.data(), true }));

    ggml_tensor * k = ggml_new_tensor_2d(ctx.get(), layer.type_k, layer.n_embd_head * layer.n_head_kv, n_rows);
    ggml_tensor * q = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, layer.n_embd_head, n_q, layer.n_head);

    // memory that is there already
    k->data = rows.k.get();
    q->data = const_cast<float *>(layer.q.data());

    ggml_tensor * kv = ggml_view_3d(ctx.get(), k, layer.n_embd_head, n_rows, layer.n_head_kv, k->nb[1],
            ggml_row_size(layer.type_k, layer.n_embd_head), 0);

    // the last n of the n_q queries of each head
    q = ggml_view_3d(ctx.get(), q, layer.n_embd_head, n, layer.n_head, q->nb[1], q->nb[2], (n_q - n) * q->nb[1]);

    // the last query sees all rows
    ggml_tensor * mask = nullptr;

    if (n > 1) {
        scorer->mask.assign((size_t) n_rows * n, 0.0f);
        for (int32_t c = 0; c < n; ++c) {
            float * end = scorer->mask.data() + (size_t) (c + 1) * n_rows;
            std::fill(end - (n - 1 - c), end, -INFINITY);
        }

        mask       = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_rows, n);
        mask->data = scorer->mask.data();
    }

    llama_dge_layer attn;

    attn.kq_scale = layer.kq_scale;
    if (!layer.sinks.empty()) {
        attn.sinks       = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, layer.sinks.size());
        attn.sinks->data = const_cast<float *>(layer.sinks.data());
    }

    const float norm = 1.0f / (n * (layer.n_head / layer.n_head_kv));

    ggml_tensor * out = llama_dge_build_op(ctx.get(), hparams, attn, flash_attn, q, kv, mask, nullptr, nullptr, norm);

    const int32_t status = compute(ctx.get(), out);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    const float * data = (const float *) out->data;
    scores.assign(data, data + layer.n_head_kv * n_rows);

    return LLAMA_DGE_OK;
}

int32_t llama_dge_choice::score_graph(size_t i, int32_t n, std::vector<float> & scores) {
    const auto & layer = layers[i];
    const auto & rows  = parked->layers[i];

    const int64_t n_group = layer.n_head / layer.n_head_kv;

    // the fast product of the CPU takes multiples of 16 keys: zeroes fill up, and the mask hides them
    const int64_t n_keys = GGML_PAD(n_rows, LLAMA_DGE_KEYS_PAD);

    GGML_ASSERT((size_t) n_keys <= rows.n_cap);
    memset(rows.k.get() + n_rows * rows.size_k, 0, (n_keys - n_rows) * rows.size_k);

    // queries of a group next to each other, so that a key is read once for all; sinks belong to single heads
    const bool    sinks   = !layer.sinks.empty();
    const int64_t n_outer = sinks ? layer.n_head : layer.n_head_kv;
    const int64_t n_col   = layer.n_head * n / n_outer;

    scorer->mask.assign(n_keys * n_col, 0.0f);

    for (int64_t c = 0; c < n_col; ++c) {
        float * end = scorer->mask.data() + (c + 1) * n_keys;
        std::fill(end - (n_keys - n_rows) - (n - 1 - c % n), end, -INFINITY);
    }

    // the last n of the n_q queries of each head
    std::vector<float> last;
    const float *      q_data = layer.q.data();

    if (n < n_q) {
        for (int64_t h = 0; h < layer.n_head; ++h) {
            const auto begin = layer.q.begin() + ((h + 1) * n_q - n) * layer.n_embd_head;
            last.insert(last.end(), begin, begin + n * layer.n_embd_head);
        }
        q_data = last.data();
    }

    ggml_context_ptr ctx(ggml_init({ scorer->meta.size(), scorer->meta.data(), true }));

    ggml_tensor * k_all = ggml_new_tensor_2d(ctx.get(), layer.type_k, layer.n_embd_head * layer.n_head_kv, n_keys);
    ggml_tensor * q     = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, layer.n_embd_head, n_col, n_outer);
    ggml_tensor * mask  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_keys, n_col);

    // memory that is there already
    k_all->data = rows.k.get();
    q->data     = const_cast<float *>(q_data);
    mask->data  = scorer->mask.data();

    ggml_tensor * k = ggml_view_3d(ctx.get(), k_all, layer.n_embd_head, n_keys, layer.n_head_kv, k_all->nb[1],
            ggml_row_size(layer.type_k, layer.n_embd_head), 0);

    ggml_tensor * kq = ggml_mul_mat(ctx.get(), k, q); // [n_keys, n_col, n_outer]
    ggml_prec_set_acc(kq, GGML_PREC_F32);

    llama_dge_layer attn;

    attn.kq_scale = layer.kq_scale;
    if (sinks) {
        attn.sinks       = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, layer.sinks.size());
        attn.sinks->data = const_cast<float *>(layer.sinks.data());
    }

    kq = llama_dge_build_probs(ctx.get(), hparams, attn, flash_attn, kq, mask, 0);

    const int32_t status = compute(ctx.get(), kq);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    scores.assign((size_t) layer.n_head_kv * n_rows, 0.0f);

    const int64_t n_cols = n * n_group;

    for (int64_t h = 0; h < layer.n_head_kv; ++h) {
        float *       sum   = scores.data() + h * n_rows;
        const float * probs = (const float *) kq->data + h * n_cols * n_keys;

        for (int64_t c = 0; c < n_cols; ++c) {
            for (int64_t j = 0; j < n_rows; ++j) {
                sum[j] += probs[c * n_keys + j];
            }
        }
        for (int64_t j = 0; j < n_rows; ++j) {
            sum[j] /= n_cols;
        }
    }

    return LLAMA_DGE_OK;
}

void llama_dge_choice::run() {
    status = LLAMA_DGE_OK;

    try {
        std::vector<float> all;

        for (size_t i = 0; scorer && i < layers.size(); ++i) {
            status = cancel ? (int32_t) LLAMA_DGE_ERR_ABORTED : score(i, n_q, all);
            if (status != LLAMA_DGE_OK) {
                return;
            }

            auto & scores = input.layers[i].draft;

            for (int64_t ih = 0; ih < layers[i].n_head_kv; ++ih) {
                const auto begin = all.begin() + ih * n_rows;
                scores.insert(scores.end(), begin, begin + input.n_past);
            }
        }

        if (!llama_dge_select(input, chosen)) {
            status = LLAMA_DGE_ERR_CALLBACK;
        }
    } catch (const std::bad_alloc &) {
        status = LLAMA_DGE_ERR_MEMORY;
    }
}
