#include "llama-dge-memory.h"

#include "llama-dge-hooks.h"
#include "llama-dge-state.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-io.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

//
// hooks
//

static thread_local bool llama_dge_elastic_on = false;

void llama_dge_set_elastic(bool elastic) {
    llama_dge_elastic_on = elastic;
}

uint32_t llama_dge_start_size(const llama_hparams & hparams, uint32_t kv_size) {
    // caches with a second one beside them that mirrors their cells stay as they are
    if (!llama_dge_elastic_on || hparams.no_alloc || hparams.is_mla() || hparams.indexer_head_size > 0) {
        return kv_size;
    }

    return llama_dge_elastic_cells(0, kv_size);
}

llama_memory_i * llama_dge_new_memory(llama_context & lctx, llama_memory_i * memory) {
    auto * cache = memory ? llama_dge_ctx::find_kv(*memory) : nullptr;

    return cache ? new llama_dge_memory(lctx, llama_memory_ptr(memory), *cache) : memory;
}

llama_memory_i * llama_dge_share_memory(llama_memory_i * memory) {
    auto * outer = dynamic_cast<llama_dge_memory *>(memory);

    if (!outer) {
        return memory;
    }

    outer->dge.share();

    return outer->inner();
}

void llama_dge_on_state_cells(llama_dge * dge, uint32_t strm, llama_seq_id seq_id, uint32_t n_cells) {
    if (dge) {
        dge->state_cells(strm, seq_id, n_cells);
    }
}

llama_dge_memory * llama_dge_memory_of(const llama_context & lctx) {
    return dynamic_cast<llama_dge_memory *>(lctx.get_memory());
}

const char * llama_dge_unsupported(const llama_context & lctx) {
    if (const char * why = llama_dge_ctx::unsupported(lctx)) {
        return why;
    }
    if (!lctx.get_memory()) {
        return "the model has no memory to evict";
    }

    const auto * memory = llama_dge_memory_of(lctx);

    return memory ? memory->dge.kv.unsupported()
                  : "the model's memory holds no plain KV cache (it is recurrent, or of a kind of its own)";
}

//
// batches and updates
//

// no ubatches: asks for an update, or makes one
class llama_dge_update_context : public llama_memory_context_i {
public:
    // the batch needs more cells than there are
    llama_dge_update_context() : status(LLAMA_MEMORY_STATUS_FAILED_PREPARE) {}

    // llama.cpp's update, then ours
    llama_dge_update_context(llama_dge & dge, llama_memory_context_ptr inner) :
        status(LLAMA_MEMORY_STATUS_SUCCESS), dge(&dge), inner(std::move(inner)) {}

    bool next() override { return false; }

    bool apply() override {
        const bool ok = inner->get_status() != LLAMA_MEMORY_STATUS_SUCCESS || inner->apply();

        dge->update();

        return ok;
    }

    const llama_ubatch & get_ubatch() const override { GGML_ABORT("an update has no ubatches"); }

    llama_memory_status get_status() const override { return status; }

private:
    const llama_memory_status status;

    llama_dge *              dge = nullptr;
    llama_memory_context_ptr inner;
};

llama_dge_memory::llama_dge_memory(llama_context & lctx, llama_memory_ptr memory_in, llama_kv_cache & cache) :
    memory(std::move(memory_in)), dge(lctx, *memory, cache) {
    cache.dge = &dge; // where graphs find it
}

llama_memory_context_ptr llama_dge_memory::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) {
    if (!dge.may_add(balloc.get_batch())) {
        return nullptr; // llama_decode() returns -2
    }
    // llama_decode() updates the memory and asks once more
    if (dge.elastic.wanted() > 0 && !asked) {
        asked = true;
        return std::make_unique<llama_dge_update_context>();
    }

    asked = false;
    dge.elastic.set_batch({});

    auto res = memory->init_batch(balloc, n_ubatch, embd_all);

    if (res && res->get_status() == LLAMA_MEMORY_STATUS_SUCCESS) {
        dge.will_add(balloc.get_batch());
    }

    return res;
}

llama_memory_context_ptr llama_dge_memory::init_full() {
    return memory->init_full();
}

llama_memory_context_ptr llama_dge_memory::init_update(llama_context * lctx, bool optimize) {
    auto res = memory->init_update(lctx, optimize);

    asked = asked && optimize; // another batch

    if (llama_memory_status_is_fail(res->get_status()) || !dge.is_due()) {
        return res;
    }

    return std::make_unique<llama_dge_update_context>(dge, std::move(res));
}

//
// sequences
//

bool llama_dge_memory::get_can_shift() const {
    // a shift that waits is one of other sequences; the update that makes it asks again, and would not take no
    return memory->get_can_shift() && (dge.kv.has_shift() || !dge.any_evicted());
}

void llama_dge_memory::clear(bool data) {
    memory->clear(data);

    for (size_t s = 0; s < dge.seqs.size(); ++s) {
        dge.on(s, LLAMA_DGE_EVENT_REMOVE_ALL);
    }
}

bool llama_dge_memory::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    return rm(seq_id, p0, p1, [&] { return memory->seq_rm(seq_id, p0, p1); });
}

void llama_dge_memory::seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    if (dge.may_cp(src, dst, p0, p1)) {
        memory->seq_cp(src, dst, p0, p1);
        dge.copied(src, dst);
    }
}

void llama_dge_memory::seq_keep(llama_seq_id seq_id) {
    memory->seq_keep(seq_id);
    dge.kept_only(seq_id);
}

void llama_dge_memory::seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (shift == 0) {
        memory->seq_add(seq_id, p0, p1, shift); // nothing happens
    } else if (dge.may_shift(seq_id)) {
        memory->seq_add(seq_id, p0, p1, shift);
        dge.shifted(seq_id);
    }
}

void llama_dge_memory::seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) {
    if (d == 1) {
        memory->seq_div(seq_id, p0, p1, d); // nothing happens
    } else if (dge.may_shift(seq_id)) {
        memory->seq_div(seq_id, p0, p1, d);
        dge.shifted(seq_id);
    }
}

llama_pos llama_dge_memory::seq_pos_min(llama_seq_id seq_id) const {
    const llama_pos res = memory->seq_pos_min(seq_id);

    return dge.seqs[seq_id].is_evicted() ? std::max(res, dge.seqs[seq_id].pos_min) : res;
}

llama_pos llama_dge_memory::seq_pos_max(llama_seq_id seq_id) const {
    return memory->seq_pos_max(seq_id);
}

std::map<ggml_backend_buffer_type_t, size_t> llama_dge_memory::memory_breakdown() const {
    return memory->memory_breakdown();
}

//
// states
//

// bytes that were read already come first
class llama_dge_io_replay : public llama_io_read_i {
public:
    llama_dge_io_replay(llama_io_read_i & io, uint32_t word) : io(io), word(word) {}

    void read(void * dst, size_t size) override {
        if (pending && size == sizeof(word)) {
            memcpy(dst, &word, size);
            pending = false;
            return;
        }
        GGML_ASSERT(!pending && "the inner memory reads a 32-bit word first");

        io.read(dst, size);
    }

    void   read_tensor(ggml_tensor * t, size_t offset, size_t size) override { io.read_tensor(t, offset, size); }
    void   discard() override { io.discard(); }
    size_t n_bytes() override { return io.n_bytes(); }

private:
    llama_io_read_i & io;

    const uint32_t word;
    bool           pending = true;
};

void llama_dge_memory::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    if (!dge.ctx.is_partial(flags)) {
        llama_dge_state_write(dge, io, seq_id);
    }

    memory->state_write(io, seq_id, flags);
}

void llama_dge_memory::clear_for_state(llama_seq_id seq_id) {
    // with eviction off, states are read as stock reads them
    for (size_t s = 0; s < dge.seqs.size() && dge.active; ++s) {
        const bool is_lost = dge.seqs[s].phase() == LLAMA_DGE_PHASE_LOST; // it stays so until it has entries

        if ((seq_id < 0 || (llama_seq_id) s == seq_id) && !is_lost) {
            memory->seq_rm(s, -1, -1);
            dge.on(s, LLAMA_DGE_EVENT_REMOVE_ALL);
        }
    }
}

void llama_dge_memory::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (dge.ctx.is_partial(flags)) {
        memory->state_read(io, seq_id, flags);
        return;
    }

    uint32_t word;
    io.read(&word, sizeof(word));

    auto pending = llama_dge_state_read(dge, io, seq_id, word);

    llama_dge_io_replay replay(io, word);

    dge.elastic.state_begins();

    const auto loaded = [&] {
        for (size_t s = 0; s < dge.seqs.size(); ++s) {
            if (seq_id < 0 || (llama_seq_id) s == seq_id) {
                const auto it = pending.find(s);

                dge.loaded(s, it == pending.end() ? nullptr : &it->second);
            }
        }
    };

    // a state replaces what is there: what llama.cpp would keep (it skips an empty one, or fails behind the first cache) would
    // not be what is known of the sequence
    clear_for_state(seq_id);

    try {
        memory->state_read(replay, seq_id, flags);
    } catch (...) {
        clear_for_state(seq_id);
        pending.clear();
        loaded();
        throw;
    }

    loaded();
}
