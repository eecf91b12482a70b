#include "llama-dge-policy.h"
#include "llama-dge.h"

// H2O, arXiv 2306.14048: per head, the entries that got the most attention from all tokens so far ("heavy hitters"), and
// the window as the recent part. The sums run on through the draft tokens; they are smooth and H2O does not pool them.
static const llama_dge_policy llama_dge_h2o = {
    /*.name        =*/"h2o",
    /*.summary     =*/"keeps the entries with the most attention from all tokens, which slows prefill down",
    /*.paper       =*/"2306.14048",
    /*.scorer      =*/LLAMA_DGE_SCORER_SUMS,
    /*.auto_scores =*/LLAMA_DGE_SCORES_POLICY,
    /*.pools       =*/false,
    /*.rank        =*/nullptr,
    /*.caps        =*/nullptr,
    /*.n_fixed     =*/nullptr,
};

LLAMA_DGE_REGISTER(llama_dge_h2o);
