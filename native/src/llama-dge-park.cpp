#include "llama-dge-move.h"

#include "llama-dge.h"

#include "llama-impl.h"

std::shared_ptr<llama_dge_store> llama_dge_park(const llama_dge_place & where, const llama_dge_sums & sums,
        llama_seq_id seq_id, const std::vector<uint32_t> & cells, const llama_dge_origin & origin,
        const llama_dge_park_args & args, int32_t & status) {
    const auto & kv = where.kv;

    auto store = std::make_shared<llama_dge_store>(kv);

    store->n_rows   = cells.size();
    store->n_exact  = cells.size();
    store->n_summed = sums.count(seq_id);
    store->origin   = origin;
    store->exts     = kv.exts(seq_id, cells);

    for (size_t i = 0; i < kv.n_layer() && !sums.empty(); ++i) {
        sums.read(i, seq_id, cells, cells.size(), store->sums.emplace_back());
    }

    if (!where.lctx.others_get(seq_id, store->others)) {
        status = LLAMA_DGE_ERR_PARK;
        return nullptr;
    }

    const int64_t n_bytes = args.n_bytes + store->n_bytes();

    if (args.limit > 0 && n_bytes > args.limit) {
        LLAMA_LOG_WARN("%s: host copies would take %lld bytes, which is above the limit of park_limit=%lld: raise it, "
                       "or set park to \"disk\" or \"off\"\n",
                __func__, (long long) n_bytes, (long long) args.limit);
        status = LLAMA_DGE_ERR_PARK;
        return nullptr;
    }

    std::string error;

    const bool to_file = args.where == LLAMA_DGE_PARK_DISK;

    bool ok = !to_file || store->file_begin(args.folder, error);

    for (size_t i = 0; ok && i < kv.n_layer(); ++i) {
        // in memory: filled layer by layer while the eviction frees the layers' old buffers
        if (!store->alloc(i, cells.size() + args.n_spare)) {
            status = LLAMA_DGE_ERR_MEMORY;
            return nullptr;
        }
        if (to_file) {
            kv.read(i, kv.stream(seq_id), cells, store->memory_of(i), 0);

            ok = store->file_write(i, error);
        }
    }

    if (!ok || (to_file && !store->file_end(error))) {
        LLAMA_LOG_ERROR("%s: %s; set park_dir to a folder with room, or park to \"off\"\n", __func__, error.c_str());
        status = LLAMA_DGE_ERR_PARK;
        return nullptr;
    }

    return store;
}

int32_t llama_dge_park_more(
        const llama_dge_kv & kv, llama_seq_id seq_id, llama_dge_store & store, const std::vector<uint32_t> & cells) {
    if (!store.grow(store.n_rows + cells.size())) {
        return LLAMA_DGE_ERR_MEMORY;
    }

    for (size_t i = 0; i < kv.n_layer(); ++i) {
        kv.read(i, kv.stream(seq_id), cells, store.entries(i), store.n_rows);
    }

    store.n_rows += cells.size();

    return LLAMA_DGE_OK;
}
