#include "llama-dge-fault.h"
#include "llama-dge-kv.h"

#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <exception>

#ifdef __GLIBC__
#include <malloc.h>
#endif

// The cache really has as many cells as it says: the arrays of cells and the tensors change together, and the rest of
// llama.cpp sees an ordinary cache of that size.

// freed memory goes back to the system; the C library keeps blocks of some MiB for itself otherwise
static void llama_dge_trim() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

bool llama_dge_kv::can_resize() const {
    for (uint32_t s = 0; s < cache.n_stream && cache.get_has_shift(); ++s) {
        const auto & cs = cells(s);

        for (uint32_t i = 0; i < cs.size(); ++i) {
            // a division that waits: the position before it cannot be told from the shift
            if (!cs.is_empty(i) && cs.pos_get(i) < cs.get_shift(i)) {
                return false;
            }
        }
    }

    return true;
}

size_t llama_dge_kv::layer_bytes(size_t i) const {
    const auto & layer = cache.layers[i];

    return ggml_nbytes(layer.k) + (layer.v ? ggml_nbytes(layer.v) : 0);
}

bool llama_dge_kv::alloc_layer(size_t i, uint32_t n_cells, llama_dge_layer_mem & mem) const {
    const auto & layer = cache.layers[i];

    mem.ctx.reset(ggml_init({ 2 * (1 + cache.n_stream) * ggml_tensor_overhead(), nullptr, true }));
    if (!mem.ctx) {
        return false;
    }

    const auto make = [&](const ggml_tensor * old, std::vector<ggml_tensor *> & streams) -> ggml_tensor * {
        if (!old) {
            streams.assign(cache.n_stream, nullptr);
            return nullptr;
        }

        ggml_tensor * t = ggml_new_tensor_3d(mem.ctx.get(), old->type, old->ne[0], n_cells, cache.n_stream);
        ggml_set_name(t, old->name);

        for (uint32_t s = 0; s < cache.n_stream; ++s) {
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

        return true;
    }

    if (!llama_dge_alloc_fails()) {
        mem.buf.reset(
                ggml_backend_alloc_ctx_tensors_from_buft(mem.ctx.get(), ggml_backend_buffer_get_type(layer.k->buffer)));
    }
    if (!mem.buf) {
        return false;
    }

    // padding must not hold a NaN
    ggml_backend_buffer_clear(mem.buf.get(), 0);

    return true;
}

//
// cells
//

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

void llama_dge_kv::copy_cells(const llama_dge_layer_mem & dst, size_t i, uint32_t n_copy) const {
    const auto & layer = cache.layers[i];

    llama_dge_check_move();

    const auto copy = [&](const ggml_tensor * from, ggml_tensor * to, const std::vector<ggml_tensor *> & from_streams,
                              const std::vector<ggml_tensor *> & to_streams, bool trans) {
        std::vector<uint8_t> data;
        std::vector<uint8_t> out;

        const bool from_host = ggml_backend_buffer_is_host(from->buffer);
        const bool to_host   = ggml_backend_buffer_is_host(to->buffer);

        // a device copies by itself what lies in one piece; the other cells are zero already
        if (!from_host && !to_host && !trans) {
            for (uint32_t s = 0; s < cache.n_stream; ++s) {
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
        copy(layer.v, dst.v, layer.v_stream, dst.v_stream, cache.v_trans);
    }
}

void llama_dge_kv::resize_cells(uint32_t n_cells) {
    for (uint32_t s = 0; s < cache.n_stream; ++s) {
        const auto old = cells(s);

        auto & cs = cells(s);

        cs.resize(n_cells);

        for (uint32_t i = 0; i < std::min(old.size(), n_cells); ++i) {
            if (old.is_empty(i)) {
                continue;
            }

            const llama_pos shift = old.get_shift(i);

            cs.pos_set(i, old.pos_get(i) - shift);
            cs.ext_set(i, old.ext_get(i));

            for (int32_t t = 0, n = old.seq_count(i); n > 0 && t < LLAMA_MAX_SEQ; ++t) {
                if (old.seq_has(i, t)) {
                    cs.seq_add(i, t);
                    n--;
                }
            }

            if (shift != 0) {
                cs.pos_add(i, shift);
            }
        }

        if (cache.v_heads[s] > n_cells) {
            cache.v_heads[s] = 0;
        }
    }
}

//
// all layers, one after the other
//

void llama_dge_kv::resize_begin() {
    if (!own_bufs) {
        staged.resize(cache.layers.size());
        layers_old = cache.layers;
    }
}

void llama_dge_kv::swap_layer(size_t i, llama_dge_layer_mem & mem) {
    auto & layer = cache.layers[i];

    layer.k        = mem.k;
    layer.v        = mem.v;
    layer.k_stream = mem.k_stream;
    layer.v_stream = mem.v_stream;

    // the buffers that the cache was made with are freed when the last layer has left them
    auto & slot = own_bufs ? cache.ctxs_bufs[i] : staged[i];

    slot.first  = std::move(mem.ctx);
    slot.second = std::move(mem.buf);
}

void llama_dge_kv::resize_end(uint32_t n_cells) {
    if (!own_bufs) {
        cache.ctxs_bufs = std::move(staged);
        staged.clear();
        layers_old.clear();

        own_bufs = true;
    }

    resize_cells(n_cells);

    llama_dge_trim();
}

bool llama_dge_kv::resize_undo(size_t n_done, uint32_t n_cells, std::vector<uint8_t> & spare) {
    if (!own_bufs) {
        cache.layers = layers_old;
        staged.clear();
        layers_old.clear();

        return true;
    }

    bool ok = true;

    // layers that have grown go back to the old size inside their new buffers: that takes no memory
    for (size_t i = 0; i < n_done; ++i) {
        ok = shrink_in_place(i, n_cells, spare) && ok;
    }

    return ok;
}

bool llama_dge_kv::shrink_in_place(size_t i, uint32_t n_cells, std::vector<uint8_t> & spare) {
    auto & layer = cache.layers[i];

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
            keep(layer.v, cache.v_trans);
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: layer %u: %s\n", __func__, layer.il, err.what());
        ok = false;
    }

    llama_dge_layer_mem mem;

    mem.buf = std::move(cache.ctxs_bufs[i].second);
    GGML_ASSERT(alloc_layer(i, n_cells, mem) && "smaller tensors fit into the buffer of larger ones");

    swap_layer(i, mem);

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
