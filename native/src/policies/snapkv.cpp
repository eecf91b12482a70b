#include "llama-dge-policy.h"
#include "llama-dge.h"

// SnapKV, arXiv 2404.14469: per head, the entries that the end of the prompt attends most, smoothed over neighbours
static const llama_dge_policy llama_dge_snapkv = {
    /*.name        =*/"snapkv",
    /*.summary     =*/"keeps the entries that the observation window attends most",
    /*.paper       =*/"2404.14469",
    /*.scorer      =*/LLAMA_DGE_SCORER_WINDOW,
    /*.auto_scores =*/LLAMA_DGE_SCORES_DRAFT,
    /*.pools       =*/true,
    /*.rank        =*/nullptr,
    /*.caps        =*/nullptr,
    /*.n_fixed     =*/nullptr,
};

LLAMA_DGE_REGISTER(llama_dge_snapkv);
