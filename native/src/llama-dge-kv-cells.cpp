#include "llama-dge-kv.h"

#include "llama-dge.h"

#include <algorithm>
#include <limits>
#include <map>

// which cells a sequence has, which are free, and what is written into them

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
        // tokens of an image share a position
        if (cell != LLAMA_DGE_NO_CELL) {
            return LLAMA_DGE_ERR_SEQ;
        }

        cell = i;
        n_found++;
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

std::vector<llama_kv_cell_ext> llama_dge_kv::exts(llama_seq_id seq_id, const std::vector<uint32_t> & own) const {
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
