#include "llama-dge-ctx.h"

#include "llama-dge-kv.h"
#include "llama-dge.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>

static llama_kv_cache_iswa * llama_dge_get_iswa(llama_memory_i & memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(&memory)) {
        return hybrid->get_mem_attn();
    }

    return dynamic_cast<llama_kv_cache_iswa *>(&memory);
}

llama_kv_cache * llama_dge_ctx::find_kv(llama_memory_i & memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(&memory)) {
        return hybrid->get_mem_attn();
    }
    if (auto * iswa = llama_dge_get_iswa(memory)) {
        return iswa->get_base();
    }

    return dynamic_cast<llama_kv_cache *>(&memory);
}

const char * llama_dge_ctx::unsupported(const llama_context & lctx) {
    const auto & hp = lctx.get_model().hparams;
    const auto & cp = lctx.get_cparams();

    if (llama_model_has_encoder(&lctx.get_model())) {
        return "the model has an encoder";
    }
    if (cp.embeddings) {
        return "the context computes embeddings";
    }
    if (!cp.causal_attn || !hp.causal_attn) {
        return "attention is not causal";
    }
    if (hp.is_mla()) {
        return "the model uses multi-head latent attention (MLA)";
    }
    if (hp.indexer_head_size > 0) {
        return "the model selects entries itself, by an indexer with a cache of its own";
    }
    if (hp.f_max_alibi_bias > 0.0f) {
        return "the model uses ALiBi: its bias needs the true distance to every entry";
    }
    if (hp.ple_n_heads > 0) {
        return "the model embeds n-grams of past tokens, which it looks up in the cache";
    }
    if (lctx.get_model().arch == LLM_ARCH_GROK) {
        return "the attention of Grok scales its logits in a way of its own";
    }
    if (lctx.get_model().split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "split mode \"tensor\" spreads a layer's cache over several devices";
    }

    return nullptr;
}

const llama_model & llama_dge_ctx::model() const {
    return lctx.get_model();
}

const llama_cparams & llama_dge_ctx::cparams() const {
    return lctx.get_cparams();
}

llama_dge_adapters llama_dge_ctx::adapters() const {
    llama_dge_adapters res;

    if (lctx.loras) {
        for (const auto & [adapter, scale] : *lctx.loras) {
            res.emplace_back(adapter, scale);
        }
    }

    std::sort(res.begin(), res.end());

    return res;
}

//
// layers that are not evicted
//

llama_kv_cache * llama_dge_ctx::swa() const {
    auto * iswa = llama_dge_get_iswa(memory);

    return iswa ? iswa->get_swa() : nullptr;
}

bool llama_dge_ctx::has_recurrent() const {
    return dynamic_cast<llama_memory_hybrid *>(&memory) || dynamic_cast<llama_memory_hybrid_iswa *>(&memory);
}

bool llama_dge_ctx::is_partial(llama_state_seq_flags flags) const {
    return (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) && (swa() || has_recurrent());
}

bool llama_dge_ctx::window_reaches(llama_seq_id seq_id, int32_t n) const {
    const auto * cache = swa();

    return !cache || n == 0 || n > cache->seq_pos_max(seq_id) ||
           cache->seq_pos_min(seq_id) <= std::max(0, n - (int32_t) model().hparams.n_swa);
}

bool llama_dge_ctx::others_get(llama_seq_id seq_id, others & res) const {
    if (const auto * cache = swa()) {
        res.pos_min = cache->seq_pos_min(seq_id);
    }
    if (!swa() && !has_recurrent()) {
        return true;
    }

    // an ordinary state has no entries outside the window of its last position, but a shorter prompt sees them
    const llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | LLAMA_DGE_STATE_FLAG_ALL_ROWS;

    res.data.resize(lctx.state_seq_get_size(seq_id, flags));

    return lctx.state_seq_get_data(seq_id, res.data.data(), res.data.size(), flags) > 0;
}

bool llama_dge_ctx::others_fit(const others & state, int32_t n, int32_t n_all) const {
    if (n == n_all) {
        return true;
    }
    // a recurrent state is that of one position
    if (has_recurrent()) {
        return false;
    }

    return !swa() || state.pos_min <= std::max(0, n - (int32_t) model().hparams.n_swa);
}

bool llama_dge_ctx::others_set(llama_seq_id seq_id, const others & state, int32_t n, int32_t n_all) {
    if (state.data.empty()) {
        return true;
    }
    if (lctx.state_seq_set_data(seq_id, state.data.data(), state.data.size(), LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) ==
            0) {
        return false;
    }

    return n == n_all || !swa() || swa()->seq_rm(seq_id, n, -1);
}

//
// graphs of our own
//

ggml_backend_sched_t llama_dge_ctx::sched() const {
    return lctx.get_sched();
}

llm_graph_result * llama_dge_ctx::graph() const {
    return lctx.get_gf_res_reserve();
}

uint32_t llama_dge_ctx::graph_max_nodes() const {
    return lctx.graph_max_nodes(1);
}

int32_t llama_dge_ctx::compute(ggml_cgraph * gf) {
    const auto status = lctx.graph_compute(gf, true);

    ggml_backend_sched_synchronize(lctx.get_sched());

    if (status == GGML_STATUS_SUCCESS) {
        return LLAMA_DGE_OK;
    }

    return status == GGML_STATUS_ABORTED ? LLAMA_DGE_ERR_ABORTED : LLAMA_DGE_ERR_COMPUTE;
}

void llama_dge_ctx::synchronize() {
    lctx.synchronize();
}

void llama_dge_ctx::wait() {
    ggml_backend_sched_synchronize(lctx.get_sched());
}

int32_t llama_dge_ctx::n_threads() const {
    return lctx.n_threads();
}

ggml_abort_callback llama_dge_ctx::abort_callback() const {
    return lctx.abort_callback;
}

void * llama_dge_ctx::abort_data() const {
    return lctx.abort_callback_data;
}

void llama_dge_ctx::update() {
    lctx.sched_reserve();
    lctx.memory_update(false);
}

void llama_dge_ctx::request_reserve() {
    lctx.sched_need_reserve = true;
}

void llama_dge_ctx::expect_buffers() {
    for (size_t i = 0; i < lctx.backend_ptrs.size() && i < lctx.backend_buf_exp_size.size(); ++i) {
        auto & size = lctx.backend_buf_exp_size[i];

        size = ggml_backend_sched_get_buffer_size(lctx.get_sched(), lctx.backend_ptrs[i]);
    }
}

void llama_dge_ctx::memory_bytes(int64_t & context, int64_t & compute) const {
    context = compute = 0;

    for (const auto & [buft, data] : lctx.memory_breakdown()) {
        context += data.context;
        compute += data.compute;
    }
}
