#include "llama-dge-move.h"

#include "llama-dge-fault.h"
#include "llama-dge-gather.h"
#include "llama-dge.h"

#include "llama-impl.h"

#include <algorithm>
#include <exception>

llama_dge_moved llama_dge_compact(const llama_dge_place & where, llama_seq_id seq_id,
        const std::vector<uint32_t> & cells, const llama_dge_kept & kept, int32_t n_past, llama_dge_store * store) {
    auto & kv = where.kv;

    const uint32_t strm = kv.stream(seq_id);

    const llama_dge_moves moves(cells, kept, n_past);

    const auto & dst    = moves.dst;
    const size_t n_keep = dst.size();

    // a host copy in a file is complete
    const bool parks = store && !store->on_disk();

    // memory runs out here or not at all: once an entry has moved there is no way back
    llama_dge_gather device(where.lctx.sched(), moves);

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        const auto & layer = kv.layer(i);

        device.add({ kv.k(i, strm), kv.v(i, strm), layer.n_head_kv, layer.size_k / layer.n_head_kv,
                layer.size_v / layer.n_head_kv, kv.is_trans() });
    }
    device.prepare();

    std::vector<uint8_t>    out;
    llama_dge_kv::host_data data;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        if (!device.takes(i)) {
            out.reserve(std::max(out.capacity(), n_keep * std::max(kv.layer(i).size_k, kv.layer(i).size_v)));
        }
        if (!device.takes(i) || parks) {
            kv.host_reserve(i, strm, data);
        }
    }

    const auto exts = kv.exts(seq_id, { cells.begin() + n_past, cells.end() });

    const uint32_t n_cells = where.elastic.shrunk(kv.top(seq_id, dst.empty() ? 0 : dst.back() + 1));

    std::vector<llama_dge_layer_mem> smaller(n_cells < kv.size() ? kv.n_layer() : 0);

    for (size_t i = 0; i < smaller.size(); ++i) {
        if (!kv.alloc_layer(i, n_cells, smaller[i])) {
            LLAMA_LOG_WARN("%s: no memory for smaller buffers, entries move in the old ones\n", __func__);
            smaller.clear();
        }
    }
    if (!smaller.empty()) {
        kv.resize_begin();
    }

    llama_dge_moved res;

    const auto move_layer = [&](size_t i) {
        // a device is read once, for the host copy and for what stays
        if (!device.takes(i) || parks) {
            kv.host_read(i, strm, data);
        }

        if (parks) {
            const int64_t t0 = ggml_time_us();

            kv.read(i, strm, cells, store->entries(i), 0, &data);

            res.t_park_us += ggml_time_us() - t0;
        }

        if (device.takes(i)) {
            return device.move(i);
        }

        kv.compact(i, strm, moves, data, out);

        return true;
    };

    bool ok = true;

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        try {
            ok = ok && move_layer(i);
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: layer %d: %s\n", __func__, kv.layer(i).il, err.what());
            ok = false;
        }

        if (smaller.empty()) {
            continue;
        }

        // also when the sequence is lost: all layers have the same number of cells, and others have entries in them
        try {
            kv.copy_cells(smaller[i], i, n_cells);
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: layer %d: %s\n", __func__, kv.layer(i).il, err.what());
            ok           = false;
            res.lost_all = true;
        }
        kv.swap_layer(i, smaller[i]);
    }

    // memory for cells is little, but where it is missing now there is no way back
    try {
        if (ok) {
            // past entries get ascending positions of their own (heads differ in what they hold), the others keep theirs
            kv.free(strm, cells);

            for (size_t r = 0; r < n_keep; ++r) {
                if (r < moves.n_cap) {
                    kv.set(seq_id, dst[r], (llama_pos) r, {});
                } else {
                    kv.set(seq_id, dst[r], (llama_pos) (n_past + r - moves.n_cap), exts[r - moves.n_cap]);
                }
            }

            // the search for free cells starts in the gap that the eviction left
            kv.set_head(strm, dst.empty() ? 0 : dst.back() + 1);
        } else {
            // the cells are freed before the cache shrinks: they may lie above its end
            kv.free_own(seq_id);

            res.status = LLAMA_DGE_ERR_LOST;
        }

        if (!smaller.empty()) {
            kv.resize_end(n_cells);
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        res.status   = LLAMA_DGE_ERR_LOST;
        res.lost_all = true;
    }

    if (!smaller.empty()) {
        // the graphs' buffers shrink with the cache
        where.lctx.request_reserve();
    }

    LLAMA_LOG_DEBUG("%s: rows of %zu of %zu layers gathered on a device\n", __func__, device.n_taken(), kept.size());

    return res;
}

llama_dge_moved llama_dge_replace(const llama_dge_place & where, llama_seq_id seq_id, std::vector<uint32_t> slots,
        const std::vector<uint32_t> & tail, llama_pos pos_min, llama_dge_kept & kept, const llama_dge_kept & want,
        int32_t n_past, const llama_dge_store & store) {
    auto & kv = where.kv;

    const uint32_t strm  = kv.stream(seq_id);
    const size_t   n_cap = llama_dge_capacity(want);

    llama_dge_moved res;

    // rows that leave the tail give their cells to more slots, then free cells do
    const size_t n_leave = n_past - pos_min;
    const size_t n_more  = n_cap > slots.size() ? n_cap - slots.size() : 0;

    std::vector<uint32_t> spare(tail.begin(), tail.begin() + std::min(n_leave, n_more));

    if (spare.size() < n_more) {
        const size_t n_free = n_more - spare.size();

        auto cells = kv.free_cells(strm, n_free);

        if (cells.size() < n_free) {
            const uint32_t n_want = kv.size() + (n_free - cells.size());

            res.status = where.elastic.grow(n_want);
            if (res.status == LLAMA_DGE_ERR_LOST) {
                res.lost_all = true;
                return res;
            }

            cells = kv.free_cells(strm, n_free);
            if (cells.size() < n_free) {
                res.status = LLAMA_DGE_ERR_MEMORY;
                return res;
            }
            res.status = LLAMA_DGE_OK;
        }

        spare.insert(spare.end(), cells.begin(), cells.end());
    }

    // from here on only a device can fail: the new slots first, then the rows, then the cells
    const size_t n_slots_old = slots.size();

    slots.insert(slots.end(), spare.begin(), spare.begin() + n_more);

    std::vector<std::pair<int32_t, uint32_t>> moves;

    const auto move_layer = [&](size_t i) {
        llama_dge_check_move();

        for (size_t ih = 0; ih < want[i].size(); ++ih) {
            auto &       held = kept[i][ih];
            const auto & rows = want[i][ih];

            // rows that stay keep their slots
            std::vector<bool> stays(rows.size(), false);
            std::vector<bool> taken(rows.size(), false);

            for (size_t s = 0; s < held.size() && s < rows.size(); ++s) {
                const auto it = std::lower_bound(rows.begin(), rows.end(), held[s]);

                if (it != rows.end() && *it == held[s]) {
                    stays[it - rows.begin()] = true;
                    taken[s]                 = true;
                }
            }

            held.resize(rows.size());
            moves.clear();

            size_t s = 0;

            for (size_t w = 0; w < rows.size(); ++w) {
                if (stays[w]) {
                    continue;
                }
                while (taken[s]) {
                    ++s;
                }

                moves.emplace_back(rows[w], slots[s]);

                held[s]  = rows[w];
                taken[s] = true;
            }

            kv.write_rows(i, strm, ih, moves, store.entries(i));
            res.n_rows += moves.size();
        }
    };

    try {
        for (size_t i = 0; i < kv.n_layer(); ++i) {
            move_layer(i);
        }

        kv.free(strm, { tail.begin(), tail.begin() + n_leave });
        if (n_cap < n_slots_old) {
            kv.free(strm, { slots.begin() + n_cap, slots.end() });
        }
        for (size_t s = n_slots_old; s < n_cap; ++s) {
            kv.set(seq_id, slots[s], (llama_pos) s, {});
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        res.status = LLAMA_DGE_ERR_LOST;
        return res;
    }

    // the next entries go into the first gap
    kv.set_head(strm, 0);

    return res;
}

llama_dge_moved llama_dge_put_back(const llama_dge_place & where, llama_seq_id seq_id, llama_dge_store & store,
        int32_t n, std::vector<uint32_t> & cells) {
    auto & kv = where.kv;

    const uint32_t strm = kv.stream(seq_id);

    llama_dge_moved res;
    std::string     error;

    if (store.on_disk()) {
        if (!store.file_reserve()) {
            res.status = LLAMA_DGE_ERR_MEMORY;
            return res;
        }
        if (!store.file_check(error)) {
            LLAMA_LOG_ERROR("%s: %s\n", __func__, error.c_str());
            res.status = LLAMA_DGE_ERR_PARK;
            return res;
        }
    }

    const uint32_t n_rows = kv.n_used_by_others(strm, seq_id) + n;

    res.status   = where.elastic.grow(n_rows);
    res.lost_all = res.status == LLAMA_DGE_ERR_LOST;

    if (res.status != LLAMA_DGE_OK || n_rows > kv.size()) {
        res.status = res.lost_all ? (int32_t) LLAMA_DGE_ERR_LOST : (int32_t) LLAMA_DGE_ERR_MEMORY;
        return res;
    }

    cells = kv.reusable_cells(seq_id, n);

    bool ok = true;

    try {
        for (size_t i = 0; ok && i < kv.n_layer(); ++i) {
            ok = !store.on_disk() || store.file_read(i, error);

            if (ok) {
                kv.write(i, strm, cells, store.entries(i));
            }

            llama_dge_check_move();
        }
    } catch (const std::exception & err) {
        error = err.what();
        ok    = false;
    }

    kv.free_own(seq_id);

    for (int32_t r = 0; r < n; ++r) {
        kv.set(seq_id, cells[r], r, store.exts[r]);
    }

    kv.set_head(strm, cells.back() + 1);

    if (ok && !where.lctx.others_set(seq_id, store.others, n, store.n_exact)) {
        error = "the state of the layers that are not evicted could not be read";
        ok    = false;
    }

    if (!ok) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, error.c_str());
        res.status = LLAMA_DGE_ERR_LOST;
    }

    return res;
}
