#pragma once

#include "llama-dge-whole.h"

#include "llama-memory.h"

// The memory of a context that can evict: all that llama.cpp asks of its memory passes through here. What is not about an
// evicted sequence is the inner memory's own.
class llama_dge_memory : public llama_memory_i {
public:
    llama_dge_memory(llama_context & lctx, llama_memory_ptr memory, llama_kv_cache & cache);

    llama_memory_i * inner() const { return memory.get(); }

    llama_memory_context_ptr init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override;

    bool get_can_shift() const override;

    void clear(bool data) override;

    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id seq_id) override;
    void seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) override;

    llama_pos seq_pos_min(llama_seq_id seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id seq_id) const override;

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;

    void state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) override;

    // removes entries by `remove`, which may refuse; false: refused, nothing changed
    template <typename F>
    bool rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1, F remove);

private:
    // empties a sequence, or all (-1), whose state is read
    void clear_for_state(llama_seq_id seq_id);

    llama_memory_ptr memory;

    bool asked = false; // the batch at hand has asked for more cells

public:
    llama_dge dge; // destroyed before the memory that it refers to
};

// nullptr where the context's memory cannot be evicted
llama_dge_memory * llama_dge_memory_of(const llama_context & lctx);

// nullptr, or why nothing can be evicted in the context
const char * llama_dge_unsupported(const llama_context & lctx);

template <typename F>
bool llama_dge_memory::rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1, F remove) {
    if (!dge.may_rm(seq_id, p0, p1)) {
        return false;
    }

    // what a removal is can be told before it only
    std::vector<std::pair<llama_seq_id, int32_t>> events;

    for (size_t s = 0; s < dge.seqs.size(); ++s) {
        if (seq_id < 0 || (llama_seq_id) s == seq_id) {
            events.emplace_back(s, dge.removal(s, p0, p1));
        }
    }

    if (!remove()) {
        return false;
    }

    for (const auto & [s, event] : events) {
        dge.removed(s, event, p0);
    }

    return true;
}
