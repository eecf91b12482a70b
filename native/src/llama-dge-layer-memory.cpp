#include "llama-dge-impl.h"

#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <exception>

// buffers of one layer of an elastic cache: new ones, and cells from the old ones into them

bool llama_dge::alloc_layer(size_t ikv, uint32_t n_cells, llama_dge_layer_mem & mem) const {
    const auto & layer = kv.layers[ikv];

    mem.ctx.reset(ggml_init({ 2 * (1 + kv.n_stream) * ggml_tensor_overhead(), nullptr, true }));
    if (!mem.ctx) {
        return false;
    }

    const auto make = [&](const ggml_tensor * old, std::vector<ggml_tensor *> & streams) -> ggml_tensor * {
        if (!old) {
            streams.assign(kv.n_stream, nullptr);
            return nullptr;
        }

        ggml_tensor * t = ggml_new_tensor_3d(mem.ctx.get(), old->type, old->ne[0], n_cells, kv.n_stream);
        ggml_set_name(t, old->name);

        for (uint32_t s = 0; s < kv.n_stream; ++s) {
            streams.push_back(ggml_view_2d(mem.ctx.get(), t, t->ne[0], n_cells, t->nb[1], s * t->nb[2]));
        }

        return t;
    };

    mem.k = make(layer.k, mem.k_stream);
    mem.v = make(layer.v, mem.v_stream);

    if (mem.buf) {
        // a larger buffer takes the tensors of a smaller cache
        auto alloc = ggml_tallocr_new(mem.buf.get());

        for (ggml_tensor * t : { mem.k, mem.v }) {
            if (t && ggml_tallocr_alloc(&alloc, t) != GGML_STATUS_SUCCESS) {
                return false;
            }
        }
        for (const auto & streams : { mem.k_stream, mem.v_stream }) {
            for (ggml_tensor * t : streams) {
                if (t && ggml_backend_view_init(t) != GGML_STATUS_SUCCESS) {
                    return false;
                }
            }
        }
    } else {
        if (!llama_dge_alloc_fails()) {
            mem.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(
                    mem.ctx.get(), ggml_backend_buffer_get_type(layer.k->buffer)));
        }
        if (!mem.buf) {
            return false;
        }

        // padding must not hold a NaN
        ggml_backend_buffer_clear(mem.buf.get(), 0);
    }

    return true;
}

void llama_dge::swap_layer(size_t ikv, llama_dge_layer_mem & mem) {
    auto & layer = kv.layers[ikv];

    layer.k        = mem.k;
    layer.v        = mem.v;
    layer.k_stream = mem.k_stream;
    layer.v_stream = mem.v_stream;

    // the buffers that the cache was made with go when the last layer has left them
    auto & slot = own_bufs ? kv.ctxs_bufs[ikv] : staged[ikv];

    slot.first  = std::move(mem.ctx);
    slot.second = std::move(mem.buf);
}

// the first n_copy cells of a tensor of n_from cells, arranged for one of n_to cells; t: one of the two
static void llama_dge_relayout(uint8_t * to, uint32_t n_to, const uint8_t * from, uint32_t n_from, uint32_t n_copy,
        const ggml_tensor * t, bool trans) {
    const size_t  size   = trans ? ggml_type_size(t->type) : t->nb[1];
    const int64_t n_rows = trans ? t->ne[0] * t->ne[2] : t->ne[2];

    for (int64_t i = 0; i < n_rows; ++i) {
        memcpy(to + i * n_to * size, from + i * n_from * size, n_copy * size);
    }
}

// the first n cells of a stream
static ggml_tensor llama_dge_first_cells(const ggml_tensor & t, uint32_t n) {
    ggml_tensor res = t;

    res.ne[1] = n;
    res.nb[2] = res.nb[1] * n;
    res.nb[3] = res.nb[2];

    return res;
}

void llama_dge::copy_cells(const llama_dge_layer_mem & dst, size_t ikv, uint32_t n_copy) const {
    const auto & layer = kv.layers[ikv];

    llama_dge_check_move();

    const auto copy = [&](const ggml_tensor * from, ggml_tensor * to, const std::vector<ggml_tensor *> & from_streams,
                              const std::vector<ggml_tensor *> & to_streams, bool trans) {
        std::vector<uint8_t> data;
        std::vector<uint8_t> out;

        const bool from_host = ggml_backend_buffer_is_host(from->buffer);
        const bool to_host   = ggml_backend_buffer_is_host(to->buffer);

        // a device copies by itself what lies in one piece; the other cells are zero already
        if (!from_host && !to_host && !trans) {
            for (uint32_t s = 0; s < kv.n_stream; ++s) {
                const ggml_tensor a = llama_dge_first_cells(*from_streams[s], n_copy);
                ggml_tensor       b = llama_dge_first_cells(*to_streams[s], n_copy);

                ggml_backend_tensor_copy(&a, &b);
            }
            return;
        }

        if (!from_host) {
            data.resize(ggml_nbytes(from));
            ggml_backend_tensor_get(from, data.data(), 0, data.size());
        }
        if (!to_host) {
            out.resize(ggml_nbytes(to), 0);
        }

        llama_dge_relayout(to_host ? (uint8_t *) to->data : out.data(), to->ne[1],
                from_host ? (const uint8_t *) from->data : data.data(), from->ne[1], n_copy, from, trans);

        if (!to_host) {
            ggml_backend_tensor_set(to, out.data(), 0, out.size());
        }
    };

    copy(layer.k, dst.k, layer.k_stream, dst.k_stream, false);

    if (layer.v) {
        copy(layer.v, dst.v, layer.v_stream, dst.v_stream, kv.v_trans);
    }
}

bool llama_dge::shrink_in_place(size_t ikv, uint32_t n_cells, std::vector<uint8_t> & spare) {
    auto & layer = kv.layers[ikv];

    bool ok = true;

    const auto keep = [&](const ggml_tensor * t, bool trans) {
        std::vector<uint8_t> data;
        if (!ggml_backend_buffer_is_host(t->buffer)) {
            data.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, data.data(), 0, data.size());
        }

        const size_t offset = spare.size();
        spare.resize(offset + ggml_nbytes(t) / t->ne[1] * n_cells);

        llama_dge_relayout(spare.data() + offset, n_cells, data.empty() ? (const uint8_t *) t->data : data.data(),
                t->ne[1], n_cells, t, trans);
    };

    spare.clear();

    try {
        keep(layer.k, false);
        if (layer.v) {
            keep(layer.v, kv.v_trans);
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: layer %u: %s\n", __func__, layer.il, err.what());
        ok = false;
    }

    llama_dge_layer_mem mem;

    mem.buf = std::move(kv.ctxs_bufs[ikv].second);
    GGML_ASSERT(alloc_layer(ikv, n_cells, mem) && "smaller tensors fit into the buffer of larger ones");

    swap_layer(ikv, mem);

    try {
        if (ok) {
            ggml_backend_tensor_set(layer.k, spare.data(), 0, ggml_nbytes(layer.k));
        }
        if (ok && layer.v) {
            ggml_backend_tensor_set(layer.v, spare.data() + ggml_nbytes(layer.k), 0, ggml_nbytes(layer.v));
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: layer %u: %s\n", __func__, layer.il, err.what());
        ok = false;
    }

    return ok;
}
