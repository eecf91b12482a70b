#include "llama-dge-kv.h"

#include "llama-dge-fault.h"
#include "llama-dge.h"

#include "llama-hparams.h"
#include "llama-model.h"

#include <algorithm>
#include <limits>
#include <map>

//
// shape
//

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

void llama_dge_kv::attach(llama_dge * dge) {
    cache.dge = dge;
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

//
// cells
//

llama_kv_cells & llama_dge_kv::cells(uint32_t strm) const {
    return cache.v_cells[strm];
}

llama_pos llama_dge_kv::pos_max(llama_seq_id seq_id) const {
    return cells(stream(seq_id)).seq_pos_max(seq_id);
}

bool llama_dge_kv::has_shift() const {
    return cache.get_has_shift();
}

static constexpr uint32_t LLAMA_DGE_NO_CELL = std::numeric_limits<uint32_t>::max();

int32_t llama_dge_kv::map_rows(llama_seq_id seq_id, std::vector<uint32_t> & res) const {
    const auto & cs = cells(stream(seq_id));

    const int32_t n = cs.seq_pos_max(seq_id) + 1;
    // positions far apart must not take memory
    if (n <= 0 || (uint32_t) n > cs.get_used()) {
        return LLAMA_DGE_ERR_SEQ;
    }

    res.assign(n, LLAMA_DGE_NO_CELL);

    int32_t n_found = 0;

    for (uint32_t i = 0; i < cs.size(); ++i) {
        if (cs.is_empty(i) || !cs.seq_has(i, seq_id)) {
            continue;
        }
        if (cs.seq_count(i) > 1) {
            return LLAMA_DGE_ERR_SHARED;
        }
        if (cs.get_shift(i) != 0) {
            return LLAMA_DGE_ERR_SEQ;
        }

        auto & cell = res[cs.pos_get(i)];
        n_found += cell == LLAMA_DGE_NO_CELL;
        cell = i;
    }

    return n_found == n ? LLAMA_DGE_OK : LLAMA_DGE_ERR_SEQ;
}

int32_t llama_dge_kv::map_evicted(llama_seq_id seq_id, size_t n_cap, llama_pos pos_min, std::vector<uint32_t> & slots,
        std::vector<uint32_t> & tail) const {
    const auto & cs = cells(stream(seq_id));

    slots.assign(n_cap, LLAMA_DGE_NO_CELL);
    tail.assign(std::max(0, cs.seq_pos_max(seq_id) + 1 - pos_min), LLAMA_DGE_NO_CELL);

    for (uint32_t i = 0; i < cs.size(); ++i) {
        if (cs.is_empty(i) || !cs.seq_has(i, seq_id)) {
            continue;
        }
        if (cs.seq_count(i) > 1) {
            return LLAMA_DGE_ERR_SHARED;
        }

        const llama_pos pos = cs.pos_get(i);

        if (pos >= pos_min) {
            tail[pos - pos_min] = i;
        } else if (pos < (llama_pos) n_cap) {
            slots[pos] = i;
        }
    }

    const bool ok = std::count(slots.begin(), slots.end(), LLAMA_DGE_NO_CELL) == 0 &&
                    std::count(tail.begin(), tail.end(), LLAMA_DGE_NO_CELL) == 0;

    return ok ? LLAMA_DGE_OK : LLAMA_DGE_ERR_SEQ;
}

std::vector<std::pair<uint32_t, llama_pos>> llama_dge_kv::cells_below(llama_seq_id seq_id, llama_pos pos) const {
    const auto & cs = cells(stream(seq_id));

    std::vector<std::pair<uint32_t, llama_pos>> res;

    for (uint32_t i = 0; i < cs.size(); ++i) {
        if (!cs.is_empty(i) && cs.seq_has(i, seq_id) && cs.pos_get(i) < pos) {
            res.emplace_back(i, cs.pos_get(i));
        }
    }

    return res;
}

uint32_t llama_dge_kv::n_cells(llama_seq_id seq_id) const {
    return cells_below(seq_id, std::numeric_limits<llama_pos>::max()).size();
}

uint32_t llama_dge_kv::n_kv(llama_seq_id seq_id) const {
    llama_kv_cache::slot_info sinfo;

    sinfo.resize(1);
    sinfo.strm[0] = stream(seq_id);

    return cache.get_n_kv(sinfo);
}

uint32_t llama_dge_kv::n_used(uint32_t strm) const {
    return cells(strm).get_used();
}

uint32_t llama_dge_kv::n_used_by_others(uint32_t strm, llama_seq_id seq_id) const {
    if (seq_id < 0) {
        return 0; // all of them are replaced
    }

    const auto & cs = cells(strm);

    uint32_t n = cs.get_used();

    for (uint32_t i = 0; i < cs.size(); ++i) {
        n -= !cs.is_empty(i) && cs.seq_has(i, seq_id) && cs.seq_count(i) == 1;
    }

    return n;
}

uint32_t llama_dge_kv::top(llama_seq_id seq_id, uint32_t n_own) const {
    uint32_t res = n_own;

    for (uint32_t s = 0; s < cache.n_stream; ++s) {
        const auto & cs = cells(s);

        for (uint32_t i = cs.used_max_p1(); i > res; --i) {
            if (!cs.is_empty(i - 1) && (s != stream(seq_id) || !cs.seq_has(i - 1, seq_id))) {
                res = i;
            }
        }
    }

    return res;
}

std::vector<uint32_t> llama_dge_kv::free_cells(uint32_t strm, size_t n) const {
    const auto & cs = cells(strm);

    std::vector<uint32_t> res;

    for (uint32_t i = 0; i < cs.size() && res.size() < n; ++i) {
        if (cs.is_empty(i)) {
            res.push_back(i);
        }
    }

    return res;
}

std::vector<uint32_t> llama_dge_kv::reusable_cells(llama_seq_id seq_id, size_t n) const {
    const auto & cs = cells(stream(seq_id));

    std::vector<uint32_t> res;

    for (uint32_t i = 0; i < cs.size() && res.size() < n; ++i) {
        if (cs.is_empty(i) || (cs.seq_has(i, seq_id) && cs.seq_count(i) == 1)) {
            res.push_back(i);
        }
    }

    return res;
}

void llama_dge_kv::used_cells(uint32_t strm, int64_t n, int32_t * res) const {
    const auto & cs = cells(strm);

    for (int64_t j = 0; j < n; ++j) {
        res[j] = cs.is_empty(j) ? cs.used_min() : j;
    }
}

void llama_dge_kv::older_cells(uint32_t strm, int64_t n, const llama_ubatch & ubatch, float * res) const {
    const auto & cs = cells(strm);

    // the cells of the ubatch hold its positions, from the first on
    std::map<llama_seq_id, llama_pos> pos_min;

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const auto it = pos_min.emplace(ubatch.seq_id[i][0], ubatch.pos[i]).first;

        it->second = std::min(it->second, ubatch.pos[i]);
    }

    for (int64_t j = 0; j < n; ++j) {
        const auto is_new = [&](const auto & first) {
            return cs.seq_has(j, first.first) && cs.pos_get(j) >= first.second;
        };

        res[j] = cs.is_empty(j) || std::any_of(pos_min.begin(), pos_min.end(), is_new) ? 0.0f : 1.0f;
    }
}

std::vector<llama_kv_cell_ext> llama_dge_kv::exts(
        llama_seq_id seq_id, const std::vector<uint32_t> & own) const {
    std::vector<llama_kv_cell_ext> res;

    for (const uint32_t cell : own) {
        res.push_back(cells(stream(seq_id)).ext_get(cell));
    }

    return res;
}

void llama_dge_kv::free(uint32_t strm, const std::vector<uint32_t> & own) {
    for (const uint32_t cell : own) {
        cells(strm).rm(cell);
    }
}

void llama_dge_kv::free_own(llama_seq_id seq_id) {
    auto & cs = cells(stream(seq_id));

    for (uint32_t i = 0; i < cs.size(); ++i) {
        if (!cs.is_empty(i) && cs.seq_has(i, seq_id)) {
            cs.seq_rm(i, seq_id);
        }
    }
}

void llama_dge_kv::set(llama_seq_id seq_id, uint32_t cell, llama_pos pos, const llama_kv_cell_ext & ext) {
    auto & cs = cells(stream(seq_id));

    cs.pos_set(cell, pos);
    cs.ext_set(cell, ext);
    cs.seq_add(cell, seq_id);
}

void llama_dge_kv::set_head(uint32_t strm, uint32_t cell) {
    cache.v_heads[strm] = cell;
}

void llama_dge_kv::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    cache.seq_rm(seq_id, p0, p1);
}
