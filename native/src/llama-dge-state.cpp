#include "llama-dge-impl.h"

#include "llama-impl.h"
#include "llama-io.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

// A state without a cut sequence is byte for byte a stock state. One with a cut sequence starts with this mark where
// stock expects its small stream count, so that stock, and this library with DGE off, refuse it.
static constexpr uint32_t LLAMA_DGE_STATE_MARK    = 0xd6ed6e01u;
static constexpr uint32_t LLAMA_DGE_STATE_VERSION = 3;

// fixed part of a sequence in the section; rows follow: per layer and head a count and the positions
struct llama_dge_state_seq {
    int32_t seq_id;
    int32_t n_prompt;
    int32_t n_draft;
    int32_t budget;
    int32_t n_before;
    int32_t n_after;
    int32_t boundary;
    int32_t pos_min;
    int64_t bytes_before;
    int64_t bytes_after;
    int64_t bytes_kept;
};

uint64_t llama_dge::fingerprint(const llama_kv_cache & kv) {
    uint64_t res = kv.v_trans;

    for (const auto & layer : kv.layers) {
        const int64_t shape[] = { layer.il, layer.k->type, layer.k->ne[0], layer.v ? layer.v->type : -1,
            layer.v ? layer.v->ne[0] : 0 };

        res = llama_dge_hash(res, shape, sizeof(shape));
    }

    // norms and biases are small, and no two models have the same
    std::vector<uint8_t> data;

    for (const auto & [name, t] : kv.model.tensors_by_name) {
        if (ggml_n_dims(t) == 1 && t->buffer && t->data) {
            data.resize(ggml_nbytes(t));
            ggml_backend_tensor_get(t, data.data(), 0, data.size());

            res = llama_dge_hash(res, data.data(), data.size());
        }
    }

    return res;
}

uint64_t llama_dge_fingerprint(const struct llama_context * ctx) {
    return llama_dge::unsupported(*ctx) ? 0 : llama_dge::fingerprint(*llama_dge::get_kv(*ctx));
}

template <typename T>
static T llama_dge_read(llama_io_read_i & io) {
    T res;
    io.read(&res, sizeof(res));
    return res;
}

template <typename T>
static void llama_dge_write(llama_io_write_i & io, const T & value) {
    io.write(&value, sizeof(value));
}

static void llama_dge_state_check(bool ok, const char * what) {
    if (!ok) {
        throw std::runtime_error(std::string("the DGE section of the state cannot be used: ") + what);
    }
}

void llama_dge_state_write(const llama_dge * dge, llama_io_write_i & io, llama_seq_id seq_id) {
    if (!dge) {
        return;
    }

    std::vector<uint32_t> ids;
    for (uint32_t s = 0; s < dge->n_seq; ++s) {
        if ((seq_id == -1 || (llama_seq_id) s == seq_id) && dge->seqs[s].state == LLAMA_DGE_STATE_EVICTED) {
            ids.push_back(s);
        }
    }

    if (ids.empty()) {
        return;
    }

    llama_dge_write(io, LLAMA_DGE_STATE_MARK);
    llama_dge_write(io, LLAMA_DGE_STATE_VERSION);
    llama_dge_write(io, llama_dge::fingerprint(dge->kv));
    llama_dge_write(io, (uint32_t) dge->layers.size());

    for (size_t i = 0; i < dge->layers.size(); ++i) {
        llama_dge_write(io, dge->layers[i].il);
        llama_dge_write(io, dge->n_head_kv(i));
    }

    llama_dge_write(io, (uint32_t) ids.size());

    for (const uint32_t s : ids) {
        const auto & seq = dge->seqs[s];

        llama_dge_write(io, llama_dge_state_seq {
                                    (int32_t) s,
                                    seq.n_prompt,
                                    seq.n_draft,
                                    seq.budget,
                                    seq.n_before,
                                    seq.n_after,
                                    seq.boundary,
                                    seq.pos_min,
                                    seq.bytes_before,
                                    seq.bytes_after,
                                    seq.bytes_kept,
                            });

        for (const auto & heads : seq.kept) {
            for (const auto & rows : heads) {
                llama_dge_write(io, (uint32_t) rows.size());
                io.write(rows.data(), rows.size() * sizeof(rows[0]));
            }
        }
    }
}

void llama_dge_state_read(llama_dge * dge, llama_io_read_i & io, llama_seq_id seq_id, uint32_t & n_stream) {
    if (dge) {
        dge->pending.clear();
        dge->state_sized = false;
    }

    if (n_stream != LLAMA_DGE_STATE_MARK) {
        return;
    }

    llama_dge_state_check(dge && dge->active, "it holds a sequence that was cut; enable DGE on this context first");
    llama_dge_state_check(llama_dge_read<uint32_t>(io) == LLAMA_DGE_STATE_VERSION, "unknown version");
    llama_dge_state_check(llama_dge_read<uint64_t>(io) == llama_dge::fingerprint(dge->kv),
            "it is of another model or another type of cache");
    llama_dge_state_check(llama_dge_read<uint32_t>(io) == dge->layers.size(), "another number of layers");

    for (size_t i = 0; i < dge->layers.size(); ++i) {
        llama_dge_state_check(llama_dge_read<int32_t>(io) == dge->layers[i].il, "other layers");
        llama_dge_state_check(llama_dge_read<uint32_t>(io) == dge->n_head_kv(i), "other heads");
    }

    const uint32_t n_seq = llama_dge_read<uint32_t>(io);
    llama_dge_state_check(n_seq >= 1 && n_seq <= (seq_id == -1 ? dge->n_seq : 1), "too many sequences");

    for (uint32_t i = 0; i < n_seq; ++i) {
        const auto head = llama_dge_read<llama_dge_state_seq>(io);

        const llama_seq_id dst = seq_id == -1 ? head.seq_id : seq_id;

        const int32_t n_cap = head.n_after - (head.n_before - head.pos_min);

        llama_dge_state_check(dst >= 0 && (uint32_t) dst < dge->n_seq, "a sequence out of range");
        llama_dge_state_check(head.pos_min >= 0 && head.pos_min <= head.boundary &&
                                      head.boundary >= head.n_prompt - 1 && head.boundary < head.n_before &&
                                      head.n_prompt >= 1 && head.n_draft >= 0 &&
                                      head.n_before == head.n_prompt + head.n_draft && n_cap >= 0 &&
                                      n_cap <= head.pos_min && (uint32_t) head.n_after <= dge->n_cells_max,
                "damaged counts");

        llama_dge_seq seq;

        seq.state        = LLAMA_DGE_STATE_EVICTED;
        seq.n_prompt     = head.n_prompt;
        seq.n_draft      = head.n_draft;
        seq.budget       = head.budget;
        seq.n_before     = head.n_before;
        seq.n_after      = head.n_after;
        seq.boundary     = head.boundary;
        seq.pos_min      = head.pos_min;
        seq.bytes_before = head.bytes_before;
        seq.bytes_after  = head.bytes_after;
        seq.bytes_kept   = head.bytes_kept;

        int32_t n_max = 0;

        for (size_t i = 0; i < dge->layers.size(); ++i) {
            auto & heads = seq.kept.emplace_back(dge->n_head_kv(i));

            for (auto & rows : heads) {
                const uint32_t n_rows = llama_dge_read<uint32_t>(io);
                llama_dge_state_check(n_rows <= (uint32_t) n_cap, "damaged rows");

                rows.resize(n_rows);
                io.read(rows.data(), rows.size() * sizeof(rows[0]));

                auto sorted = rows; // they are by slot
                std::sort(sorted.begin(), sorted.end());

                for (uint32_t r = 0; r < n_rows; ++r) {
                    llama_dge_state_check(
                            sorted[r] >= (r > 0 ? sorted[r - 1] + 1 : 0) && sorted[r] < head.pos_min, "damaged rows");
                }

                n_max = std::max(n_max, (int32_t) n_rows);
            }
        }

        llama_dge_state_check(n_max == n_cap, "damaged rows");
        llama_dge_state_check(
                dge->bias_reserve(seq.kept) == LLAMA_DGE_OK, "rows per head that this context cannot attend");

        dge->pending.emplace_back(dst, std::move(seq));
    }

    n_stream = llama_dge_read<uint32_t>(io);
}

void llama_dge_state_read_end(llama_dge * dge) {
    if (!dge) {
        return;
    }

    for (auto & [seq_id, seq] : dge->pending) {
        dge->seqs[seq_id] = std::move(seq);
        dge->bias_changed(seq_id);
    }

    dge->pending.clear();
}
