#include "llama-dge-impl.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>

static llama_kv_cache_iswa * llama_dge_get_iswa(const llama_context & lctx) {
    auto * memory = llama_dge::get_memory(lctx);

    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_attn();
    }

    return dynamic_cast<llama_kv_cache_iswa *>(memory);
}

llama_kv_cache * llama_dge::get_kv(const llama_context & lctx) {
    auto * memory = get_memory(lctx);

    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_attn();
    }
    if (auto * iswa = llama_dge_get_iswa(lctx)) {
        return iswa->get_base();
    }

    return dynamic_cast<llama_kv_cache *>(memory);
}

llama_kv_cache * llama_dge::get_swa(const llama_context & lctx) {
    auto * iswa = llama_dge_get_iswa(lctx);

    return iswa ? iswa->get_swa() : nullptr;
}

bool llama_dge::window_reaches(const llama_context & lctx, llama_seq_id seq_id, int32_t n) const {
    const auto * swa = get_swa(lctx);

    return !swa || n == 0 || n > swa->seq_pos_max(seq_id) ||
           swa->seq_pos_min(seq_id) <= std::max(0, n - (int32_t) kv.hparams.n_swa);
}

bool llama_dge::has_recurrent(const llama_context & lctx) {
    auto * memory = get_memory(lctx);

    return dynamic_cast<llama_memory_hybrid *>(memory) || dynamic_cast<llama_memory_hybrid_iswa *>(memory);
}

llama_dge_adapters llama_dge::get_adapters(const llama_context & lctx) {
    llama_dge_adapters res;

    if (lctx.loras) {
        for (const auto & [adapter, scale] : *lctx.loras) {
            res.emplace_back(adapter, scale);
        }
    }

    std::sort(res.begin(), res.end());

    return res;
}

const char * llama_dge::unsupported(const llama_context & lctx) {
    const auto & model   = lctx.get_model();
    const auto & hparams = model.hparams;
    const auto & cparams = lctx.get_cparams();

    if (llama_model_has_encoder(&model)) {
        return "the model has an encoder";
    }
    if (cparams.embeddings) {
        return "the context computes embeddings";
    }
    if (!lctx.get_memory()) {
        return "the model has no memory to cut";
    }
    if (!cparams.causal_attn || !hparams.causal_attn) {
        return "attention is not causal";
    }

    const auto * kv = get_kv(lctx);

    if (!kv) {
        return "the model's memory holds no plain KV cache (it is recurrent, or of a kind of its own)";
    }
    if (hparams.is_mla()) {
        return "the model uses multi-head latent attention (MLA)";
    }
    if (hparams.indexer_head_size > 0) {
        return "the model selects rows itself, by an indexer with a cache of its own";
    }
    if (hparams.f_max_alibi_bias > 0.0f) {
        return "the model uses ALiBi: its bias needs the true distance to every row";
    }
    if (hparams.n_pos_per_embd() > 1) {
        return "the model uses M-RoPE positions";
    }
    if (hparams.ple_n_heads > 0) {
        return "the model embeds n-grams of past tokens, which it looks up in the cache";
    }
    if (model.arch == LLM_ARCH_GROK) {
        return "the attention of Grok scales its logits in a way of its own";
    }
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "split mode \"tensor\" spreads a layer's cache over several devices";
    }
    if (kv->other || kv->v_cells_impl.use_count() > 1) {
        return "the cache is shared with another context";
    }
    if (kv->layers.empty()) {
        return "no layer has a cache that could be cut";
    }
    if (kv->map_layer_ids.size() != kv->layers.size()) {
        return "several layers share one cache";
    }
    for (const auto & layer : kv->layers) {
        const uint32_t n_head_kv = hparams.n_head_kv(layer.il);
        if (n_head_kv == 0 || hparams.n_head(layer.il) % n_head_kv != 0) {
            return "a layer has no KV heads, or not the same number of query heads for each";
        }
        if (!layer.v) {
            return "a layer has no V cache of its own";
        }
    }

    return nullptr;
}
