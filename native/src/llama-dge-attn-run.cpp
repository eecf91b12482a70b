#include "llama-dge-attn.h"
#include "llama-dge-fault.h"
#include "llama-dge.h"

#include "llama-graph.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>

// graphs of our own that score: keys in the cache by the context's scheduler, keys in host memory by the CPU

//
// keys in the cache
//

int32_t llama_dge_score_cells(llama_dge_ctx & lctx, const llama_dge_kv & kv, size_t i, uint32_t strm,
        const llama_dge_attn & attn, const std::vector<uint32_t> & cells, ggml_tensor * q,
        const std::vector<int32_t> & q_rows, llama_pos p0, int32_t n_past, std::vector<float> & scores) {
    const auto & layer = kv.layer(i);

    const int64_t n_embd = layer.n_embd_head_k;
    const int64_t n_q    = q_rows.size();
    const int64_t n_keys = p0 + n_q;

    // keys are taken where they lie, among cells of others that the mask hides, as long as these do not outnumber them
    const auto    ends  = std::minmax_element(cells.begin(), cells.begin() + n_keys);
    const int64_t begin = *ends.first;
    const int64_t size  = (int64_t) *ends.second - begin + 1;
    const bool    dense = size <= 2 * n_keys;
    const int64_t n_kv  = dense ? size : n_keys;

    // column of a position in the result
    const auto column = [&](int64_t pos) {
        return dense ? (int64_t) cells[pos] - begin : pos;
    };

    auto * sched = lctx.sched();
    auto * res   = lctx.graph();

    ggml_backend_sched_reset(sched);
    res->reset();

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    ggml_tensor * rows_q = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_q);
    ggml_tensor * rows_k = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_kv);
    ggml_tensor * mask   = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_kv, n_q);

    for (ggml_tensor * t : { rows_q, rows_k, mask }) {
        ggml_set_input(t);
    }

    ggml_tensor * q_all = ggml_get_rows(ctx, q, rows_q); // [n_embd_q, n_q]

    llama_dge_score_args args;

    args.attn       = attn;
    args.q          = ggml_view_3d(ctx, q_all, n_embd, n_q, layer.n_head, q_all->nb[1], n_embd * sizeof(float), 0);
    args.mask       = mask;
    args.k_all      = kv.k(i, strm);
    args.k_rows     = rows_k;
    args.norm       = 1.0f / (n_q * (layer.n_head / layer.n_head_kv));
    args.buf        = args.k_all->buffer;
    args.max_blocks = lctx.graph_max_nodes() / (LLAMA_DGE_BLOCK_NODES + LLAMA_DGE_HEAD_NODES);

    if (dense) {
        args.k = ggml_view_3d(ctx, args.k_all, n_embd, n_kv, layer.n_head_kv, args.k_all->nb[1],
                ggml_row_size(layer.type_k, n_embd), begin * args.k_all->nb[1]);
    }

    ggml_tensor * out = llama_dge_build_scores(ctx, gf, args);
    ggml_set_output(out);

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        LLAMA_LOG_ERROR("%s: failed to allocate the graph of layer %d\n", __func__, layer.il);
        return LLAMA_DGE_ERR_MEMORY;
    }

    ggml_backend_tensor_set(rows_q, q_rows.data(), 0, ggml_nbytes(rows_q));

    // the fused operation reads keys where they lie
    if (rows_k->buffer) {
        std::vector<int32_t> data(n_kv, (int32_t) cells[0]); // what is hidden is some key of the sequence

        for (int64_t j = 0; j < n_keys; ++j) {
            data[column(j)] = cells[j];
        }
        ggml_backend_tensor_set(rows_k, data.data(), 0, ggml_nbytes(rows_k));
    }
    {
        std::vector<ggml_fp16_t> data(n_kv * n_q, ggml_fp32_to_fp16(-INFINITY));

        for (int64_t c = 0; c < n_q; ++c) {
            for (int64_t j = 0; j <= p0 + c; ++j) {
                data[c * n_kv + column(j)] = ggml_fp32_to_fp16(0.0f);
            }
        }
        ggml_backend_tensor_set(mask, data.data(), 0, ggml_nbytes(mask));
    }

    const int32_t status = lctx.compute(gf);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    std::vector<float> data(ggml_nelements(out));
    ggml_backend_tensor_get(out, data.data(), 0, ggml_nbytes(out));

    scores.resize((size_t) layer.n_head_kv * n_past);

    for (int64_t ih = 0; ih < layer.n_head_kv; ++ih) {
        for (int64_t j = 0; j < n_past; ++j) {
            scores[ih * n_past + j] = data[ih * n_kv + column(j)];
        }
    }

    return LLAMA_DGE_OK;
}

//
// keys in host memory
//

std::unique_ptr<llama_dge_cpu_scorer> llama_dge_cpu_scorer::create() {
    std::unique_ptr<llama_dge_cpu_scorer> res(new llama_dge_cpu_scorer);

    res->backend.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!res->backend) {
        return nullptr;
    }

    res->galloc.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(res->backend.get())));
    res->meta.resize(16 * ggml_tensor_overhead() + ggml_graph_overhead());

    return res;
}

void llama_dge_cpu_scorer::configure(int32_t n_threads, ggml_abort_callback abort, void * abort_data) {
    auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));

    const auto set_n_threads =
            (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    const auto set_abort = (ggml_backend_set_abort_callback_t) ggml_backend_reg_get_proc_address(
            reg, "ggml_backend_set_abort_callback");

    if (set_n_threads) {
        set_n_threads(backend.get(), n_threads);
    }
    if (set_abort) {
        set_abort(backend.get(), abort, abort_data);
    }
}

int32_t llama_dge_cpu_scorer::score(const llama_dge_kv_layer & layer, const llama_dge_attn & attn,
        const std::vector<float> & sinks, const std::vector<float> & q, int32_t n_q, int32_t n, const uint8_t * k,
        int32_t n_rows, std::vector<float> & scores) {
    GGML_ASSERT(n <= n_q);

    ggml_context_ptr ctx(ggml_init({ meta.size(), meta.data(), true }));

    const int64_t n_embd = layer.n_embd_head_k;

    ggml_tensor * k_all = ggml_new_tensor_2d(ctx.get(), layer.type_k, n_embd * layer.n_head_kv, n_rows);
    ggml_tensor * q_all = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_embd, n_q, layer.n_head);

    // memory that is there already; the operation does not write to it
    k_all->data = const_cast<uint8_t *>(k);
    q_all->data = const_cast<float *>(q.data());

    llama_dge_score_args args;

    args.attn = attn;
    args.k    = ggml_view_3d(
            ctx.get(), k_all, n_embd, n_rows, layer.n_head_kv, k_all->nb[1], ggml_row_size(layer.type_k, n_embd), 0);
    args.q    = ggml_view_3d(ctx.get(), q_all, n_embd, n, layer.n_head, q_all->nb[1], q_all->nb[2],
            (n_q - n) * q_all->nb[1]); // the last n of each head
    args.norm = 1.0f / (n * (layer.n_head / layer.n_head_kv));

    // the last query sees all rows
    if (n > 1) {
        mask.assign((size_t) n_rows * n, 0.0f);
        for (int32_t c = 0; c < n; ++c) {
            float * end = mask.data() + (size_t) (c + 1) * n_rows;
            std::fill(end - (n - 1 - c), end, -INFINITY);
        }

        args.mask       = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_rows, n);
        args.mask->data = mask.data();
    }

    args.attn.sinks = nullptr;
    if (!sinks.empty()) {
        args.attn.sinks       = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, sinks.size());
        args.attn.sinks->data = const_cast<float *>(sinks.data());
    }

    auto * gf = ggml_new_graph(ctx.get());

    ggml_tensor * out = llama_dge_build_scores(ctx.get(), gf, args);
    ggml_set_output(out);

    if (llama_dge_alloc_fails() || !ggml_gallocr_alloc_graph(galloc.get(), gf)) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    const auto status = ggml_backend_graph_compute(backend.get(), gf);
    if (status != GGML_STATUS_SUCCESS) {
        return status == GGML_STATUS_ABORTED ? LLAMA_DGE_ERR_ABORTED : LLAMA_DGE_ERR_COMPUTE;
    }

    const float * data = (const float *) out->data;
    scores.assign(data, data + layer.n_head_kv * n_rows);

    return LLAMA_DGE_OK;
}
