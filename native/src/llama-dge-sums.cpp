#include "llama-dge-sums.h"

#include "llama-dge-ring.h"

#include <algorithm>

llama_dge_kv::shapes_t llama_dge_sums::shapes(const llama_dge_kv & kv) {
    llama_dge_kv::shapes_t res;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        res.push_back({ kv.size_max(), kv.layer(i).n_head_kv, kv.n_stream() });
    }

    return res;
}

bool llama_dge_sums::reserve(bool on) {
    std::vector<ggml_tensor *> tensors_new;
    llama_dge_bufs             bufs_new;

    if (on && !kv.alloc_beside("dge_sums", shapes(kv), tensors_new, bufs_new)) {
        return false;
    }

    tensors = std::move(tensors_new);
    bufs    = std::move(bufs_new);

    // entries that are there already are missing in the sums
    for (size_t s = 0; s < counts.size(); ++s) {
        counts[s] = kv.pos_max(s) < 0 ? 0 : -1;
    }

    return true;
}

int64_t llama_dge_sums::n_bytes() const {
    return llama_dge_bufs_bytes(bufs);
}

void llama_dge_sums::drop(llama_seq_id seq_id, llama_pos p0) {
    if (p0 < counts[seq_id]) {
        counts[seq_id] = -1;
    }
}

//
// capture
//

std::vector<float> llama_dge_sums::plan(const llama_ubatch & ubatch, const filter_t & captures) const {
    std::vector<float> weights;

    if (empty()) {
        return weights;
    }

    bool any = false;

    // a token that does not follow those that were summed is in no sum: its cells may belong to others as well
    auto next = counts;

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        const bool is_next = captures(seq_id, ubatch.pos[i]) && next[seq_id] == ubatch.pos[i];

        if (is_next) {
            next[seq_id]++;
        }

        weights.push_back(is_next ? 1.0f : 0.0f);
        any |= is_next;
    }

    if (!any) {
        weights.clear();
    }

    return weights;
}

void llama_dge_sums::begin(const llama_ubatch & ubatch, const std::vector<float> & weights) {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        if (weights[i] != 0.0f) {
            counts[ubatch.seq_id[i][0]]++;
        }
    }
}

void llama_dge_sums::build(size_t i, ggml_context * ctx, ggml_cgraph * gf, const llama_dge_attn & attn,
        const inputs & inp, const llama_ubatch & ubatch, ggml_tensor * q_cur, ggml_tensor * k,
        ggml_tensor * kq_mask) const {
    const int64_t n_embd    = k->ne[0];
    const int64_t n_head_kv = k->ne[1];
    const int64_t n_kv      = k->ne[2];
    const int64_t n_stream  = k->ne[3];
    const int64_t n_q       = q_cur->ne[2] / n_stream;

    ggml_tensor * sums = tensors[i];

    for (int64_t s = 0; s < n_stream; ++s) {
        ggml_tensor * q =
                ggml_view_3d(ctx, q_cur, n_embd, q_cur->ne[1], n_q, q_cur->nb[1], q_cur->nb[2], s * n_q * q_cur->nb[2]);
        ggml_tensor * ks = ggml_view_3d(ctx, k, n_embd, n_head_kv, n_kv, k->nb[1], k->nb[2], s * k->nb[3]);

        ggml_tensor * acc =
                ggml_view_2d(ctx, sums, n_kv, n_head_kv, sums->nb[1], (kv.stream_begin(ubatch) + s) * sums->nb[2]);
        ggml_tensor * keep = ggml_view_1d(ctx, inp.keep, n_kv, s * inp.keep->nb[2]);

        llama_dge_score_args args;

        args.attn    = attn;
        args.q       = ggml_permute(ctx, q, 0, 2, 1, 3);
        args.k       = ggml_permute(ctx, ks, 0, 2, 1, 3);
        args.mask    = ggml_view_2d(ctx, kq_mask, n_kv, n_q, kq_mask->nb[1], s * kq_mask->nb[3]);
        args.k_all   = ggml_view_2d(ctx, k, n_embd * n_head_kv, n_kv, k->nb[2], s * k->nb[3]);
        args.k_rows  = ggml_view_1d(ctx, inp.cells, n_kv, s * inp.cells->nb[2]);
        args.weights = ggml_view_1d(ctx, inp.weights, n_q, s * n_q * inp.weights->nb[0]);
        args.acc     = ggml_cpy(ctx, ggml_mul(ctx, acc, keep), acc);
        args.buf     = sums->buffer;

        llama_dge_build_scores(ctx, gf, args);
    }
}

void llama_dge_sums::set_inputs(
        const inputs & inp, const llama_ubatch & ubatch, const std::vector<float> & weights) const {
    ggml_backend_tensor_set(inp.weights, weights.data(), 0, ggml_nbytes(inp.weights));

    const uint32_t s0       = kv.stream_begin(ubatch);
    const int64_t  n_kv     = inp.keep->ne[0];
    const int64_t  n_stream = inp.keep->ne[2];

    // only ordinary operations read rows of K
    if (inp.cells->buffer) {
        std::vector<int32_t> data(n_kv * n_stream);
        for (int64_t s = 0; s < n_stream; ++s) {
            kv.used_cells(s0 + s, n_kv, data.data() + s * n_kv);
        }
        ggml_backend_tensor_set(inp.cells, data.data(), 0, ggml_nbytes(inp.cells));
    }

    std::vector<float> data(n_kv * n_stream);
    for (int64_t s = 0; s < n_stream; ++s) {
        kv.older_cells(s0 + s, n_kv, ubatch, data.data() + s * n_kv);
    }
    ggml_backend_tensor_set(inp.keep, data.data(), 0, ggml_nbytes(inp.keep));
}

int64_t llama_dge_sums::n_nodes(uint32_t n_tokens) const {
    int64_t res = 0;

    for (size_t i = 0; i < kv.n_layer() && !empty(); ++i) {
        res += (24 + llama_dge_score_nodes(kv.layer(i), kv.size_max(), n_tokens)) * kv.n_stream();
    }

    return res;
}

//
// sums on the host
//

void llama_dge_sums::read(
        size_t i, llama_seq_id seq_id, const std::vector<uint32_t> & cells, int32_t n, std::vector<float> & res) const {
    const auto * sums = tensors[i];

    const int64_t n_kv      = sums->ne[0];
    const int64_t n_head_kv = sums->ne[1];

    std::vector<float> data(n_kv * n_head_kv);
    ggml_backend_tensor_get(sums, data.data(), kv.stream(seq_id) * sums->nb[2], data.size() * sizeof(float));

    res.resize((size_t) n_head_kv * n);

    for (int64_t ih = 0; ih < n_head_kv; ++ih) {
        for (int64_t j = 0; j < n; ++j) {
            res[ih * n + j] = data[ih * n_kv + cells[j]];
        }
    }
}

void llama_dge_sums::write(size_t i, llama_seq_id seq_id, const std::vector<uint32_t> & cells,
        const std::vector<float> & data, int32_t stride) {
    auto * sums = tensors[i];

    const int64_t n_kv      = sums->ne[0];
    const int64_t n_head_kv = sums->ne[1];
    const size_t  offset    = kv.stream(seq_id) * sums->nb[2];

    // cells of other sequences keep theirs
    std::vector<float> all(n_kv * n_head_kv);
    ggml_backend_tensor_get(sums, all.data(), offset, all.size() * sizeof(float));

    for (int64_t ih = 0; ih < n_head_kv; ++ih) {
        for (size_t j = 0; j < cells.size(); ++j) {
            all[ih * n_kv + cells[j]] = data[ih * stride + j];
        }
    }

    ggml_backend_tensor_set(sums, all.data(), offset, all.size() * sizeof(float));
}
