#include "llama-dge-state.h"

#include "llama-dge-whole.h"

#include "llama-io.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

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

void llama_dge_state_write(const llama_dge & dge, llama_io_write_i & io, llama_seq_id seq_id) {
    std::vector<uint32_t> ids;
    for (size_t s = 0; s < dge.seqs.size(); ++s) {
        if ((seq_id == -1 || (llama_seq_id) s == seq_id) && dge.seqs[s].is_evicted()) {
            ids.push_back(s);
        }
    }

    if (ids.empty()) {
        return;
    }

    const auto & kv = dge.kv;

    llama_dge_write(io, LLAMA_DGE_STATE_MARK);
    llama_dge_write(io, LLAMA_DGE_STATE_VERSION);
    llama_dge_write(io, kv.fingerprint());
    llama_dge_write(io, (uint32_t) kv.n_layer());

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        llama_dge_write(io, kv.layer(i).il);
        llama_dge_write(io, (uint32_t) kv.layer(i).n_head_kv);
    }

    llama_dge_write(io, (uint32_t) ids.size());

    for (const uint32_t s : ids) {
        const auto & seq   = dge.seqs[s];
        const auto & stats = seq.stats;

        llama_dge_write(io, llama_dge_state_seq {
                                    (int32_t) s,
                                    seq.n_prompt,
                                    stats.n_draft,
                                    stats.budget,
                                    stats.n_before,
                                    stats.n_after,
                                    seq.boundary,
                                    seq.pos_min,
                                    stats.bytes_before,
                                    stats.bytes_after,
                                    stats.bytes_kept,
                            });

        for (const auto & heads : seq.kept) {
            for (const auto & rows : heads) {
                llama_dge_write(io, (uint32_t) rows.size());
                io.write(rows.data(), rows.size() * sizeof(rows[0]));
            }
        }
    }
}

static llama_dge_seq llama_dge_state_read_seq(llama_dge & dge, llama_io_read_i & io, const llama_dge_state_seq & head) {
    const auto & kv = dge.kv;

    const int32_t n_cap = head.n_after - (head.n_before - head.pos_min);

    llama_dge_state_check(head.pos_min >= 0 && head.pos_min <= head.boundary && head.boundary >= head.n_prompt - 1 &&
                                  head.boundary < head.n_before && head.n_prompt >= 1 && head.n_draft >= 0 &&
                                  head.n_before == head.n_prompt + head.n_draft && n_cap >= 0 &&
                                  n_cap <= head.pos_min && (uint32_t) head.n_after <= kv.size_max(),
            "damaged counts");

    llama_dge_seq seq;

    seq.n_prompt = head.n_prompt;
    seq.boundary = head.boundary;
    seq.pos_min  = head.pos_min;

    seq.stats.n_draft      = head.n_draft;
    seq.stats.budget       = head.budget;
    seq.stats.n_before     = head.n_before;
    seq.stats.n_after      = head.n_after;
    seq.stats.bytes_before = head.bytes_before;
    seq.stats.bytes_after  = head.bytes_after;
    seq.stats.bytes_kept   = head.bytes_kept;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        auto & heads = seq.kept.emplace_back(kv.layer(i).n_head_kv);

        for (auto & rows : heads) {
            const uint32_t n_rows = llama_dge_read<uint32_t>(io);
            llama_dge_state_check(n_rows <= (uint32_t) n_cap, "damaged entries");

            rows.resize(n_rows);
            io.read(rows.data(), rows.size() * sizeof(rows[0]));

            auto sorted = rows; // they are by slot
            std::sort(sorted.begin(), sorted.end());

            llama_dge_state_check(llama_dge_rows_ok(sorted, head.pos_min), "damaged entries");
        }
    }

    llama_dge_state_check((int32_t) llama_dge_capacity(seq.kept) == n_cap, "damaged entries");
    llama_dge_state_check(
            dge.bias.reserve(seq.kept) == LLAMA_DGE_OK, "entries per head that this context cannot attend");

    return seq;
}

std::map<llama_seq_id, llama_dge_seq> llama_dge_state_read(
        llama_dge & dge, llama_io_read_i & io, llama_seq_id seq_id, uint32_t & word) {
    std::map<llama_seq_id, llama_dge_seq> res;

    if (word != LLAMA_DGE_STATE_MARK) {
        return res;
    }

    const auto & kv = dge.kv;

    llama_dge_state_check(dge.active, "it holds an evicted sequence; enable DGE on this context first");
    llama_dge_state_check(llama_dge_read<uint32_t>(io) == LLAMA_DGE_STATE_VERSION, "unknown version");
    llama_dge_state_check(
            llama_dge_read<uint64_t>(io) == kv.fingerprint(), "it is of another model or another type of cache");
    llama_dge_state_check(llama_dge_read<uint32_t>(io) == kv.n_layer(), "another number of layers");

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        llama_dge_state_check(llama_dge_read<int32_t>(io) == kv.layer(i).il, "other layers");
        llama_dge_state_check(llama_dge_read<uint32_t>(io) == kv.layer(i).n_head_kv, "other heads");
    }

    const uint32_t n_seq = llama_dge_read<uint32_t>(io);
    llama_dge_state_check(n_seq >= 1 && n_seq <= (seq_id == -1 ? kv.n_seq() : 1), "too many sequences");

    for (uint32_t i = 0; i < n_seq; ++i) {
        const auto head = llama_dge_read<llama_dge_state_seq>(io);

        const llama_seq_id dst = seq_id == -1 ? head.seq_id : seq_id;

        llama_dge_state_check(dge.knows(dst), "a sequence out of range");

        res[dst] = llama_dge_state_read_seq(dge, io, head);
    }

    word = llama_dge_read<uint32_t>(io);

    return res;
}
