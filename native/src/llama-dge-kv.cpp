#include "llama-dge-kv.h"

#include "llama-dge-fault.h"
#include "llama-dge.h"

#include "llama-hparams.h"
#include "llama-model.h"

#include <algorithm>
#include <map>

llama_dge_kv::llama_dge_kv(llama_kv_cache & cache) : cache(cache) {
    const auto & hp = cache.hparams;

    for (const auto & layer : cache.layers) {
        const uint32_t il = layer.il;

        // models without a V cache of their own are refused later on
        shapes.push_back({
                (int32_t) il,
                hp.n_head(il),
                hp.n_head_kv(il),
                hp.n_embd_head_k(il),
                hp.n_embd_head_v(il),
                layer.k->type,
                layer.v ? layer.v->type : layer.k->type,
                ggml_row_size(layer.k->type, hp.n_embd_k_gqa(il)),
                layer.v ? ggml_row_size(layer.v->type, hp.n_embd_v_gqa(il)) : 0,
        });
    }
}

int32_t llama_dge_kv::find(int32_t il) const {
    for (size_t i = 0; i < shapes.size(); ++i) {
        if (shapes[i].il == il) {
            return (int32_t) i;
        }
    }

    return -1;
}

const llama_hparams & llama_dge_kv::hparams() const {
    return cache.hparams;
}

uint32_t llama_dge_kv::n_seq() const {
    return cache.n_seq_max;
}

uint32_t llama_dge_kv::n_seq_all() const {
    return cache.seq_to_stream.size();
}

uint32_t llama_dge_kv::n_stream() const {
    return cache.n_stream;
}

uint32_t llama_dge_kv::stream(llama_seq_id seq_id) const {
    return cache.seq_to_stream[seq_id];
}

uint32_t llama_dge_kv::size() const {
    return cache.get_size();
}

uint32_t llama_dge_kv::size_max() const {
    return cache.dge_size_max;
}

bool llama_dge_kv::is_trans() const {
    return cache.v_trans;
}

uint32_t llama_dge_kv::stream_begin(const llama_ubatch & ubatch) const {
    uint32_t res = cache.n_stream - 1;

    for (uint32_t s = 0; s < ubatch.n_seqs_unq; ++s) {
        res = std::min(res, cache.seq_to_stream[ubatch.seq_id_unq[s]]);
    }

    return res;
}

ggml_tensor * llama_dge_kv::k(size_t i, uint32_t strm) const {
    return cache.layers[i].k_stream[strm];
}

ggml_tensor * llama_dge_kv::v(size_t i, uint32_t strm) const {
    return cache.layers[i].v_stream[strm];
}

ggml_backend_buffer_t llama_dge_kv::buffer(size_t i) const {
    return cache.layers[i].k->buffer;
}

int64_t llama_dge_kv::row_bytes() const {
    int64_t res = 0;

    for (const auto & shape : shapes) {
        res += shape.size_k + shape.size_v;
    }

    return res;
}

int64_t llama_dge_kv::cell_bytes() const {
    int64_t res = 0;

    for (const auto & layer : cache.layers) {
        res += layer.k->nb[1] * cache.n_stream;
        res += layer.v ? layer.v->nb[1] * cache.n_stream : 0;
    }

    return res;
}

int64_t llama_dge_kv::total_bytes() const {
    int64_t res = 0;

    for (const auto & [buft, size] : cache.memory_breakdown()) {
        res += size;
    }

    return res;
}

int64_t llama_dge_kv::kept_bytes(const llama_dge_kept & kept, int32_t n_tail) const {
    int64_t res = 0;

    for (size_t i = 0; i < shapes.size(); ++i) {
        const int64_t size = (shapes[i].size_k + shapes[i].size_v) / shapes[i].n_head_kv;

        for (const auto & rows : kept[i]) {
            res += size * (rows.size() + n_tail);
        }
    }

    return res;
}

uint64_t llama_dge_kv::fingerprint() const {
    uint64_t res = cache.v_trans;

    for (const auto & layer : cache.layers) {
        const int64_t shape[] = { layer.il, layer.k->type, layer.k->ne[0], layer.v ? layer.v->type : -1,
            layer.v ? layer.v->ne[0] : 0 };

        res = llama_dge_hash(res, shape, sizeof(shape));
    }

    // norms and biases are small, and no two models have the same
    std::vector<uint8_t> data;

    for (const auto & [name, t] : cache.model.tensors_by_name) {
        if (ggml_n_dims(t) == 1 && t->buffer && t->data) {
            data.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, data.data(), 0, data.size());

            res = llama_dge_hash(res, data.data(), data.size());
        }
    }

    return res;
}

const char * llama_dge_kv::unsupported() const {
    const auto & hp = cache.hparams;

    if (cache.other || cache.v_cells_impl.use_count() > 1) {
        return "the cache is shared with another context";
    }
    if (cache.layers.empty()) {
        return "no layer has a cache that could be evicted";
    }
    if (cache.map_layer_ids.size() != cache.layers.size()) {
        return "several layers share one cache";
    }
    for (const auto & layer : cache.layers) {
        const uint32_t n_head_kv = hp.n_head_kv(layer.il);
        if (n_head_kv == 0 || hp.n_head(layer.il) % n_head_kv != 0) {
            return "a layer has no KV heads, or not the same number of query heads for each";
        }
        if (!layer.v) {
            return "a layer has no V cache of its own";
        }
    }

    return nullptr;
}

bool llama_dge_kv::alloc_beside(
        const char * name, const shapes_t & ne, std::vector<ggml_tensor *> & res, llama_dge_bufs & bufs) const {
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs;

    res.assign(ne.size(), nullptr);

    for (size_t i = 0; i < ne.size(); ++i) {
        if (ne[i][0] * ne[i][1] * ne[i][2] == 0) {
            continue;
        }

        auto & ctx = ctxs[ggml_backend_buffer_get_type(buffer(i))];
        if (!ctx) {
            ctx.reset(ggml_init({ ne.size() * ggml_tensor_overhead(), nullptr, true }));
        }
        if (!ctx) {
            return false;
        }

        res[i] = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, ne[i][0], ne[i][1], ne[i][2]);
        ggml_format_name(res[i], "%s_l%d", name, shapes[i].il);
    }

    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_ptr buf(
                llama_dge_alloc_fails() ? nullptr : ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        if (!buf) {
            return false;
        }

        ggml_backend_buffer_clear(buf.get(), 0);
        bufs.emplace_back(std::move(ctx), std::move(buf));
    }

    return true;
}

int64_t llama_dge_kv::beside_bytes(const shapes_t & ne) const {
    int64_t res = 0;

    for (size_t i = 0; i < ne.size(); ++i) {
        const size_t align = ggml_backend_buft_get_alignment(ggml_backend_buffer_get_type(buffer(i)));

        res += GGML_PAD(ne[i][0] * ne[i][1] * ne[i][2] * (int64_t) sizeof(float), (int64_t) align);
    }

    return res;
}
