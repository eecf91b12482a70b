#include "llama-dge-policy.h"
#include "llama-dge.h"

// TOVA, arXiv 2401.06104: the entries that the last token attends most, averaged over the heads of a layer, so that all of
// them keep the same. The paper evicts one entry after each token; this is its selection at the end of the prompt.

static void llama_dge_tova_rank(const llama_dge_select_input &, llama_dge_ranks & ranks) {
    for (size_t i = 0; i < ranks[0].size(); ++i) {
        float sum = 0.0f;

        for (const auto & rank : ranks) {
            sum += rank[i];
        }
        for (auto & rank : ranks) {
            rank[i] = sum / ranks.size();
        }
    }
}

static const llama_dge_policy llama_dge_tova = {
    /*.name        =*/"tova",
    /*.summary     =*/"keeps the entries that the last token attends most, the same in all heads of a layer",
    /*.paper       =*/"2401.06104",
    /*.scorer      =*/LLAMA_DGE_SCORER_LAST,
    /*.auto_scores =*/LLAMA_DGE_SCORES_POLICY,
    /*.pools       =*/false,
    /*.rank        =*/llama_dge_tova_rank,
    /*.caps        =*/nullptr,
    /*.n_fixed     =*/nullptr,
};

LLAMA_DGE_REGISTER(llama_dge_tova);
