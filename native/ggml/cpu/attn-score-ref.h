#pragma once

#include "ggml.h"

#include <cstdint>

void llama_dge_to_float(ggml_type type, const void * x, float * y, int64_t n);

// everything in double and in the plainest way: what the other is compared with where a backend runs as a reference
void llama_dge_attn_score_ref(ggml_tensor * dst, int ith, int nth);
