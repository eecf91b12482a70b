#pragma once

// GGML_OP_ATTN_SCORE in ggml-metal, which the patches make call these. C, for ggml-metal-device.m.

#include "ggml-metal-device.h"

#ifdef __cplusplus
extern "C" {
#endif

// The first call for a device compiles the kernels there, each first call for a type of K its pipelines. Where that fails
// the operation is not supported, which costs a warning and nothing else: other kernels are of another library.
bool ggml_metal_op_attn_score_supported(ggml_metal_device_t dev, const struct ggml_tensor * op);

// bytes behind the result
size_t ggml_metal_op_attn_score_extra(const struct ggml_tensor * op);

// returns the number of nodes that were encoded: 1
int ggml_metal_op_attn_score(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const struct ggml_tensor * op);

#ifdef __cplusplus
}
#endif
