#include "llama-dge-select.h"

// A callback chooses the rows of a whole layer, see llama_dge_select_callback
const llama_dge_policy_impl llama_dge_policy_custom = {
    /*.name         =*/"custom",
    /*.needs_scores =*/true,
    /*.needs_sums   =*/false,
    /*.caps         =*/nullptr,
    /*.select       =*/nullptr,
};
