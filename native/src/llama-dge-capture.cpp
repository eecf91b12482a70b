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
// what was captured, outside of the context
//

static constexpr uint32_t LLAMA_DGE_QUERIES_MAGIC = 0x73656764; // "dges"

// then int32_t pos[n_pos], ascending, for each layer F32 [n_embd_q][n_pos], and for each layer F32 [n_summed][n_head_kv]
struct llama_dge_queries_header {
    uint32_t magic;
    uint32_t n_layer;
    uint64_t n_embd; // of the queries of all layers
    uint64_t n_pos;
    uint64_t n_head; // KV heads of all layers
    uint64_t n_summed;
};

static size_t llama_dge_queries_size(const llama_dge_queries_header & header) {
    return sizeof(header) + header.n_pos * (sizeof(int32_t) + header.n_embd * sizeof(float)) +
           header.n_summed * header.n_head * sizeof(float);
}

llama_dge_queries_header llama_dge::queries_header() const {
    llama_dge_queries_header res = { LLAMA_DGE_QUERIES_MAGIC, (uint32_t) layers.size(), 0, 0, 0, 0 };

    for (size_t i = 0; i < layers.size(); ++i) {
        res.n_embd += (uint64_t) kv.hparams.n_embd_head_k(layers[i].il) * kv.hparams.n_head(layers[i].il);
        res.n_head += n_head_kv(i);
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
    if (n_ring == 0 && sums_bufs.empty()) {
        return 0;
    }

    const auto & seq = seqs[seq_id];
    const auto   pos = captured_pos(seq_id);

    auto header = queries_header();

    header.n_pos = pos.size();

    // rows of a cut sequence, or of one that shares cells, have no sums of their own
    std::vector<uint32_t> cells;
    if (!sums_bufs.empty() && seq.n_summed > 0 && map_cells(seq_id, cells) == LLAMA_DGE_OK) {
        header.n_summed = seq.n_summed;
    }

    const size_t res = llama_dge_queries_size(header);

    if (!dst || size < res) {
        return dst ? 0 : res;
    }

    const auto write = [&dst](const void * src, size_t n) {
        memcpy(dst, src, n);
        dst += n;
    };

    write(&header, sizeof(header));
    write(pos.data(), pos.size() * sizeof(int32_t));

    for (const auto & layer : layers) {
        for (const llama_pos p : pos) {
            const size_t row = (size_t) seq_id * n_ring + p % n_ring;

            ggml_backend_tensor_get(layer.ring, dst, row * layer.ring->nb[1], layer.ring->nb[1]);
            dst += layer.ring->nb[1];
        }
    }

    std::vector<float> sums;

    for (size_t i = 0; header.n_summed > 0 && i < layers.size(); ++i) {
        read_sums(i, seq_id, cells, header.n_summed, sums);
        write(sums.data(), sums.size() * sizeof(float));
    }

    return res;
}

int32_t llama_dge::queries_set(llama_seq_id seq_id, const uint8_t * src, size_t size) {
    if (seqs[seq_id].state == LLAMA_DGE_STATE_EVICTED) {
        return LLAMA_DGE_ERR_EVICTED;
    }

    std::vector<uint32_t> cells;

    const int32_t status = map_cells(seq_id, cells);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    // settings that need nothing have no place for it
    if (n_ring == 0 && sums_bufs.empty()) {
        return LLAMA_DGE_OK;
    }

    llama_dge_queries_header header;
    if (size < sizeof(header)) {
        return LLAMA_DGE_ERR_PARAMS;
    }
    memcpy(&header, src, sizeof(header));

    const auto want = queries_header();

    // what is multiplied is bounded before
    if (header.magic != want.magic || header.n_layer != want.n_layer || header.n_embd != want.n_embd ||
            header.n_head != want.n_head || header.n_pos > size || header.n_summed > size ||
            size != llama_dge_queries_size(header)) {
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

    if (n_ring > 0) {
        ring_set(seq_id, pos, cells.size(), src);
    }
    src += header.n_pos * header.n_embd * sizeof(float);

    // settings that need no sums have no place for them, and where none are given those at hand go on
    if (sums_bufs.empty() || header.n_summed == 0) {
        return LLAMA_DGE_OK;
    }

    // what removed rows added cannot be taken out again
    if (header.n_summed > cells.size()) {
        seqs[seq_id].n_summed = -1;
        return LLAMA_DGE_OK;
    }

    cells.resize(header.n_summed);

    std::vector<float> sums;

    for (size_t i = 0; i < layers.size(); ++i) {
        sums.resize(header.n_summed * n_head_kv(i));
        memcpy(sums.data(), src, sums.size() * sizeof(float));
        src += sums.size() * sizeof(float);

        write_sums(i, seq_id, cells, sums, header.n_summed);
    }

    seqs[seq_id].n_summed = header.n_summed;

    return LLAMA_DGE_OK;
}

void llama_dge::ring_set(llama_seq_id seq_id, const std::vector<int32_t> & pos, int32_t n_rows, const uint8_t * src) {
    // the last ones of the rows that are there
    const size_t i1 = std::lower_bound(pos.begin(), pos.end(), n_rows) - pos.begin();
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
}
