#include "llama-dge-ring.h"

#include <algorithm>

int64_t llama_dge_bufs_bytes(const llama_dge_bufs & bufs) {
    int64_t res = 0;

    for (const auto & [ctx, buf] : bufs) {
        res += ggml_backend_buffer_get_size(buf.get());
    }

    return res;
}

llama_dge_kv::shapes_t llama_dge_ring::shapes(const llama_dge_kv & kv, uint32_t n_ring) {
    llama_dge_kv::shapes_t res;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        res.push_back({ kv.layer(i).n_embd_q(), (int64_t) n_ring * kv.n_seq(), 1 });
    }

    return res;
}

bool llama_dge_ring::reserve(uint32_t n_ring_new) {
    std::vector<ggml_tensor *> tensors_new;
    llama_dge_bufs             bufs_new;

    if (!kv.alloc_beside("dge_q", shapes(kv, n_ring_new), tensors_new, bufs_new)) {
        return false;
    }

    n_ring  = n_ring_new;
    tensors = std::move(tensors_new);
    bufs    = std::move(bufs_new);
    stored.assign((size_t) n_ring * kv.n_seq(), -1);

    return true;
}

int64_t llama_dge_ring::n_bytes() const {
    return llama_dge_bufs_bytes(bufs);
}

size_t llama_dge_ring::most(const llama_ubatch & ubatch) const {
    return std::min<size_t>(ubatch.n_tokens, (size_t) n_ring * ubatch.n_seqs_unq);
}

std::vector<llama_dge_capture> llama_dge_ring::plan(const llama_ubatch & ubatch, const filter_t & captures) const {
    std::vector<llama_dge_capture> res;

    if (n_ring == 0) {
        return res;
    }

    std::vector<llama_pos> pos_max(kv.n_seq(), -1);

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];

        if (captures(seq_id, ubatch.pos[i])) {
            pos_max[seq_id] = std::max(pos_max[seq_id], ubatch.pos[i]);
        }
    }

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        const llama_pos    pos    = ubatch.pos[i];

        // an earlier query of the same row would be written by the same node in no certain order
        if (captures(seq_id, pos) && pos + (llama_pos) n_ring > pos_max[seq_id]) {
            res.push_back({ (int32_t) i, (int64_t) seq_id * n_ring + pos % n_ring, pos });
        }
    }

    return res;
}

void llama_dge_ring::begin(const std::vector<llama_dge_capture> & rows) {
    for (const auto & row : rows) {
        stored[row.dst] = row.pos;
    }
}

bool llama_dge_ring::has(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    for (llama_pos p = p0; p < p1; ++p) {
        if (n_ring == 0 || stored[(size_t) seq_id * n_ring + p % n_ring] != p) {
            return false;
        }
    }

    return true;
}

void llama_dge_ring::drop(llama_seq_id seq_id, llama_pos p0) {
    for (uint32_t i = 0; i < n_ring && (uint32_t) seq_id < kv.n_seq(); ++i) {
        auto & pos = stored[(size_t) seq_id * n_ring + i];

        if (pos >= p0) {
            pos = -1;
        }
    }
}

std::vector<int32_t> llama_dge_ring::rows(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    std::vector<int32_t> res;

    for (llama_pos p = p0; p < p1; ++p) {
        res.push_back((int32_t) ((int64_t) seq_id * n_ring + p % n_ring));
    }

    return res;
}

std::vector<llama_pos> llama_dge_ring::positions(llama_seq_id seq_id) const {
    std::vector<llama_pos> res;

    for (uint32_t i = 0; i < n_ring; ++i) {
        const llama_pos pos = stored[(size_t) seq_id * n_ring + i];
        if (pos >= 0) {
            res.push_back(pos);
        }
    }

    std::sort(res.begin(), res.end());

    return res;
}

void llama_dge_ring::read(size_t i, llama_seq_id seq_id, llama_pos pos, float * dst) const {
    const auto * t = tensors[i];

    ggml_backend_tensor_get(t, dst, ((size_t) seq_id * n_ring + pos % n_ring) * t->nb[1], t->nb[1]);
}

void llama_dge_ring::set(llama_seq_id seq_id, const std::vector<int32_t> & pos, int32_t n_rows, const uint8_t * src) {
    // the last ones of the entries that are there
    const size_t i1 = std::lower_bound(pos.begin(), pos.end(), n_rows) - pos.begin();
    const size_t i0 =
            i1 == 0 ? 0 : std::upper_bound(pos.begin(), pos.begin() + i1, pos[i1 - 1] - (int32_t) n_ring) - pos.begin();

    drop(seq_id, 0);

    for (ggml_tensor * t : tensors) {
        for (size_t i = i0; i < i1; ++i) {
            const size_t row = (size_t) seq_id * n_ring + pos[i] % n_ring;

            ggml_backend_tensor_set(t, src + i * t->nb[1], row * t->nb[1], t->nb[1]);
            stored[row] = pos[i];
        }
        src += pos.size() * t->nb[1];
    }
}
