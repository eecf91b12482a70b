#pragma once

// what ggml-cpu.c calls

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

void ggml_compute_forward_attn_score(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// bytes of params->wdata
size_t ggml_attn_score_work_size(const struct ggml_tensor * dst, int n_tasks);

#ifdef __cplusplus
}
#endif
