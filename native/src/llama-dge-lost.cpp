#include "llama-dge-impl.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"

// A sequence is lost when a device fails after the first of its rows has moved: what its cells hold by then cannot be told.
// It is emptied, and no batch may go on with it, as an empty sequence would take one at any position.

// Takes the place of a context's memory until the batch at hand asks for its cells, and gives none: the one way to make
// llama_decode() fail behind a memory update and in front of any change. All else is the memory's own.
class llama_dge_refusal : public llama_memory_i {
public:
    llama_dge_refusal(llama_context & lctx, llama_memory_ptr memory) : lctx(lctx), memory(std::move(memory)) {}

    llama_memory_i * get() const { return memory.get(); }

    llama_memory_context_ptr init_batch(llama_batch_allocr &, uint32_t, bool) override {
        // deletes this object
        llama_dge::set_memory(lctx, std::move(memory));

        return nullptr;
    }

    llama_memory_context_ptr init_full() override { return memory->init_full(); }
    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override {
        return memory->init_update(lctx, optimize);
    }

    bool get_can_shift() const override { return memory->get_can_shift(); }

    void clear(bool data) override { memory->clear(data); }

    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override { return memory->seq_rm(seq_id, p0, p1); }
    void seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) override {
        memory->seq_cp(src, dst, p0, p1);
    }
    void seq_keep(llama_seq_id seq_id) override { memory->seq_keep(seq_id); }
    void seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) override {
        memory->seq_add(seq_id, p0, p1, shift);
    }
    void seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) override {
        memory->seq_div(seq_id, p0, p1, d);
    }

    llama_pos seq_pos_min(llama_seq_id seq_id) const override { return memory->seq_pos_min(seq_id); }
    llama_pos seq_pos_max(llama_seq_id seq_id) const override { return memory->seq_pos_max(seq_id); }

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override {
        return memory->memory_breakdown();
    }

    void state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const override {
        memory->state_write(io, seq_id, flags);
    }
    void state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) override {
        memory->state_read(io, seq_id, flags);
    }

private:
    llama_context &  lctx;
    llama_memory_ptr memory;
};

llama_memory_i * llama_dge::get_memory(const llama_context & lctx) {
    auto * memory  = lctx.get_memory();
    auto * refusal = dynamic_cast<llama_dge_refusal *>(memory);

    return refusal ? refusal->get() : memory;
}

void llama_dge::set_memory(llama_context & lctx, llama_memory_ptr memory) {
    lctx.memory = std::move(memory);
}

void llama_dge::lose(llama_context * lctx, llama_seq_id seq_id) {
    llama_memory_i * memory = lctx ? get_memory(*lctx) : &kv;

    const llama_seq_id s0 = seq_id < 0 ? 0 : seq_id;
    const llama_seq_id s1 = seq_id < 0 ? (llama_seq_id) kv.seq_to_stream.size() : seq_id + 1;

    for (llama_seq_id s = s0; s < s1; ++s) {
        if (seq_id < 0 && kv.seq_pos_max(s) < 0) {
            continue;
        }

        // forgets all that is known of it
        memory->seq_rm(s, -1, -1);

        lost.set(s);

        if ((uint32_t) s < n_seq) {
            seqs[s].error = LLAMA_DGE_ERR_LOST;
        }

        LLAMA_LOG_ERROR("%s: seq %d is empty now: %s\n", __func__, s, llama_dge_status_str(LLAMA_DGE_ERR_LOST));
    }

    if (lctx) {
        refuse(*lctx);
    }
}

void llama_dge::refuse(llama_context & lctx) {
    bool refused = false;

    for (int32_t i = 0; batch && i < batch->n_tokens; ++i) {
        for (int32_t j = 0; j < batch->n_seq_id[i]; ++j) {
            const llama_seq_id s = batch->seq_id[i][j];

            // positions of a sequence ascend within a batch
            if (lost.test(s) && batch->pos[i] == 0) {
                lost.reset(s);
            }

            refused |= lost.test(s);
        }
    }

    if (refused && get_memory(lctx) == lctx.get_memory()) {
        LLAMA_LOG_ERROR("%s: the batch goes on with a sequence that was cleared\n", __func__);

        set_memory(lctx, std::make_unique<llama_dge_refusal>(lctx, std::move(lctx.memory)));
    }
}
