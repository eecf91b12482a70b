#include "llama-dge-impl.h"

#include <algorithm>

bool llama_dge::captures(llama_seq_id seq_id, llama_pos pos) const {
    if (!active || seq_id < 0 || (uint32_t) seq_id >= n_seq) {
        return false;
    }

    const auto & seq = seqs[seq_id];

    switch (seq.state) {
        case LLAMA_DGE_STATE_FULL: return true;
        // rows above are of no use to the cut and would overwrite those that are
        case LLAMA_DGE_STATE_ARMED: return recalls() || pos < seq.n_prompt + params.draft_tokens - 1;
        default:                    return recalls();
    }
}

std::vector<llama_dge::capture_row> llama_dge::capture_plan(const llama_ubatch & ubatch) const {
    std::vector<capture_row> rows;

    if (n_ring == 0) {
        return rows;
    }

    std::vector<llama_pos> pos_max(n_seq, -1);

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        if (captures(seq_id, ubatch.pos[i])) {
            pos_max[seq_id] = std::max(pos_max[seq_id], ubatch.pos[i]);
        }
    }

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        const llama_pos    pos    = ubatch.pos[i];

        // an earlier row of the same slot would be written by the same node in no certain order
        if (captures(seq_id, pos) && pos + (llama_pos) n_ring > pos_max[seq_id]) {
            rows.push_back({ (int32_t) i, (int64_t) seq_id * n_ring + pos % n_ring, pos });
        }
    }

    return rows;
}

void llama_dge::capture_begin(const std::vector<capture_row> & rows) {
    for (const auto & row : rows) {
        ring_pos[row.dst] = row.pos;
    }
}

bool llama_dge::captured(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    for (llama_pos p = p0; p < p1; ++p) {
        if (n_ring == 0 || ring_pos[(size_t) seq_id * n_ring + p % n_ring] != p) {
            return false;
        }
    }

    return true;
}

void llama_dge::capture_drop(llama_seq_id seq_id, llama_pos p0) {
    for (uint32_t i = 0; i < n_ring; ++i) {
        auto & pos = ring_pos[(size_t) seq_id * n_ring + i];

        if (pos >= p0) {
            pos = -1;
        }
    }

    // what removed rows added to the sums cannot be taken out again
    if (p0 < seqs[seq_id].n_summed) {
        seqs[seq_id].n_summed = -1;
    }
}
