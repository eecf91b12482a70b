#include "llama-dge-impl.h"

#include <algorithm>
#include <cstring>

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

//
// captured queries outside of the ring
//

static constexpr uint32_t LLAMA_DGE_QUERIES_MAGIC = 0x71656764; // "dgeq"

// then int32_t pos[n_pos], ascending, and for each layer F32 [n_embd_q][n_pos]
struct llama_dge_queries_header {
    uint32_t magic;
    uint32_t n_layer;
    uint64_t n_embd; // of all layers
    uint64_t n_pos;
};

static size_t llama_dge_queries_size(uint64_t n_pos, uint64_t n_embd) {
    return sizeof(llama_dge_queries_header) + n_pos * (sizeof(int32_t) + n_embd * sizeof(float));
}

static uint64_t llama_dge_n_embd_q(const std::vector<llama_dge_layer> & layers) {
    uint64_t res = 0;
    for (const auto & layer : layers) {
        res += layer.ring->ne[0];
    }
    return res;
}

std::vector<llama_pos> llama_dge::captured_pos(llama_seq_id seq_id) const {
    std::vector<llama_pos> res;

    for (uint32_t i = 0; i < n_ring; ++i) {
        const llama_pos pos = ring_pos[(size_t) seq_id * n_ring + i];
        if (pos >= 0) {
            res.push_back(pos);
        }
    }

    std::sort(res.begin(), res.end());

    return res;
}

size_t llama_dge::queries_get(llama_seq_id seq_id, uint8_t * dst, size_t size) const {
    if (n_ring == 0) {
        return 0;
    }

    const auto     pos    = captured_pos(seq_id);
    const uint64_t n_embd = llama_dge_n_embd_q(layers);
    const size_t   res    = llama_dge_queries_size(pos.size(), n_embd);

    if (!dst || size < res) {
        return dst ? 0 : res;
    }

    const llama_dge_queries_header header = { LLAMA_DGE_QUERIES_MAGIC, (uint32_t) layers.size(), n_embd, pos.size() };

    memcpy(dst, &header, sizeof(header));
    dst += sizeof(header);
    memcpy(dst, pos.data(), pos.size() * sizeof(int32_t));
    dst += pos.size() * sizeof(int32_t);

    for (const auto & layer : layers) {
        for (const llama_pos p : pos) {
            const size_t row = (size_t) seq_id * n_ring + p % n_ring;

            ggml_backend_tensor_get(layer.ring, dst, row * layer.ring->nb[1], layer.ring->nb[1]);
            dst += layer.ring->nb[1];
        }
    }

    return res;
}

int32_t llama_dge::queries_set(llama_seq_id seq_id, const uint8_t * src, size_t size) {
    if (seqs[seq_id].state == LLAMA_DGE_STATE_CUT) {
        return LLAMA_DGE_ERR_CUT;
    }

    std::vector<uint32_t> cells;

    const int32_t status = map_cells(seq_id, cells);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    // settings that need no queries have no place for them
    if (n_ring == 0) {
        return LLAMA_DGE_OK;
    }

    llama_dge_queries_header header;
    if (size < sizeof(header)) {
        return LLAMA_DGE_ERR_PARAMS;
    }
    memcpy(&header, src, sizeof(header));

    // n_pos is bounded before it is multiplied
    if (header.magic != LLAMA_DGE_QUERIES_MAGIC || header.n_layer != layers.size() ||
            header.n_embd != llama_dge_n_embd_q(layers) || header.n_pos > size ||
            size != llama_dge_queries_size(header.n_pos, header.n_embd)) {
        return LLAMA_DGE_ERR_PARAMS;
    }

    std::vector<int32_t> pos(header.n_pos);
    memcpy(pos.data(), src + sizeof(header), pos.size() * sizeof(int32_t));
    src += sizeof(header) + pos.size() * sizeof(int32_t);

    for (size_t i = 0; i < pos.size(); ++i) {
        if (pos[i] < 0 || (i > 0 && pos[i] <= pos[i - 1])) {
            return LLAMA_DGE_ERR_PARAMS;
        }
    }

    // the last ones of the rows that are there
    const size_t i1 = std::lower_bound(pos.begin(), pos.end(), (int32_t) cells.size()) - pos.begin();
    const size_t i0 =
            i1 == 0 ? 0 : std::upper_bound(pos.begin(), pos.begin() + i1, pos[i1 - 1] - (int32_t) n_ring) - pos.begin();

    for (uint32_t i = 0; i < n_ring; ++i) {
        ring_pos[(size_t) seq_id * n_ring + i] = -1;
    }

    for (const auto & layer : layers) {
        for (size_t i = i0; i < i1; ++i) {
            const size_t row = (size_t) seq_id * n_ring + pos[i] % n_ring;

            ggml_backend_tensor_set(
                    layer.ring, src + i * layer.ring->nb[1], row * layer.ring->nb[1], layer.ring->nb[1]);
            ring_pos[row] = pos[i];
        }
        src += pos.size() * layer.ring->nb[1];
    }

    return LLAMA_DGE_OK;
}
