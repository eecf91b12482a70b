#include "llama-dge-whole.h"

#include <algorithm>
#include <cstring>

// what was captured, outside of the context

static constexpr uint32_t LLAMA_DGE_QUERIES_MAGIC = 0x73656764; // "dges"

// then int32_t pos[n_pos], ascending, for each layer F32 [n_pos][n_embd_q], and for each layer F32 [n_head_kv][n_summed]
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

// of this model, nothing captured
static llama_dge_queries_header llama_dge_queries_of(const llama_dge_kv & kv) {
    llama_dge_queries_header res = { LLAMA_DGE_QUERIES_MAGIC, (uint32_t) kv.n_layer(), 0, 0, 0, 0 };

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        res.n_embd += kv.layer(i).n_embd_q();
        res.n_head += kv.layer(i).n_head_kv;
    }

    return res;
}

size_t llama_dge::queries_get(llama_seq_id seq_id, uint8_t * dst, size_t size) const {
    if (ring->empty() && sums->empty()) {
        return 0;
    }

    const auto pos = ring->positions(seq_id);

    auto header = llama_dge_queries_of(kv);

    header.n_pos = pos.size();

    // an evicted sequence, or one that shares cells, has no sums of its own
    std::vector<uint32_t> cells;
    if (!sums->empty() && sums->count(seq_id) > 0 && kv.map_rows(seq_id, cells) == LLAMA_DGE_OK) {
        header.n_summed = sums->count(seq_id);
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

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        for (const llama_pos p : pos) {
            std::vector<float> row(kv.layer(i).n_embd_q());
            ring->read(i, seq_id, p, row.data());
            write(row.data(), row.size() * sizeof(float));
        }
    }

    std::vector<float> data;

    for (size_t i = 0; header.n_summed > 0 && i < kv.n_layer(); ++i) {
        sums->read(i, seq_id, cells, header.n_summed, data);
        write(data.data(), data.size() * sizeof(float));
    }

    return res;
}

int32_t llama_dge::queries_set(llama_seq_id seq_id, const uint8_t * src, size_t size) {
    if (seqs[seq_id].is_evicted()) {
        return LLAMA_DGE_ERR_EVICTED;
    }

    std::vector<uint32_t> cells;

    const int32_t status = kv.map_rows(seq_id, cells);
    if (status != LLAMA_DGE_OK) {
        return status;
    }

    // settings that need nothing have no place for it
    if (ring->empty() && sums->empty()) {
        return LLAMA_DGE_OK;
    }

    llama_dge_queries_header header;
    if (size < sizeof(header)) {
        return LLAMA_DGE_ERR_PARAMS;
    }
    memcpy(&header, src, sizeof(header));

    const auto want = llama_dge_queries_of(kv);

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

    if (!ring->empty()) {
        ring->set(seq_id, pos, cells.size(), src);
    }
    src += header.n_pos * header.n_embd * sizeof(float);

    // settings that need no sums have no place for them, and where none are given those at hand go on
    if (sums->empty() || header.n_summed == 0) {
        return LLAMA_DGE_OK;
    }

    // what removed tokens added cannot be taken out again
    if (header.n_summed > cells.size()) {
        sums->spoil(seq_id);
        return LLAMA_DGE_OK;
    }

    cells.resize(header.n_summed);

    std::vector<float> data;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        data.resize(header.n_summed * kv.layer(i).n_head_kv);
        memcpy(data.data(), src, data.size() * sizeof(float));
        src += data.size() * sizeof(float);

        sums->write(i, seq_id, cells, data, header.n_summed);
    }

    sums->set_count(seq_id, header.n_summed);

    return LLAMA_DGE_OK;
}
