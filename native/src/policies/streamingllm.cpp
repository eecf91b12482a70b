#include "llama-dge-policy.h"
#include "llama-dge.h"

// StreamingLLM, arXiv 2309.17453: attention sinks and the most recent entries, whatever the attention. Entries keep their
// original positions, as in the field's benchmark code and unlike the paper's cache, which renumbers them.

static void llama_dge_streamingllm_rank(const llama_dge_select_input & input, llama_dge_ranks & ranks) {
    for (auto & rank : ranks) {
        rank.resize(input.n_past);

        for (int32_t i = 0; i < input.n_past; ++i) {
            rank[i] = (float) (i < input.params.sinks ? 2 * input.n_past - i : i); // sinks first, then the latest
        }
    }
}

static int32_t llama_dge_streamingllm_fixed(const llama_dge_select_params & params) {
    return params.sinks;
}

static const llama_dge_policy llama_dge_streamingllm = {
    /*.name        =*/"streamingllm",
    /*.summary     =*/"keeps the first `sinks` entries and the last ones",
    /*.paper       =*/"2309.17453",
    /*.scorer      =*/LLAMA_DGE_SCORER_NONE,
    /*.auto_scores =*/LLAMA_DGE_SCORES_POLICY,
    /*.pools       =*/false,
    /*.rank        =*/llama_dge_streamingllm_rank,
    /*.caps        =*/nullptr,
    /*.n_fixed     =*/llama_dge_streamingllm_fixed,
};

LLAMA_DGE_REGISTER(llama_dge_streamingllm);
