"""ggml: what the operation ATTN_SCORE is built on, and what our graphs expect of backends."""

from __future__ import annotations

from .probe import Count, Order, Probe

_OP_PATCH = "../patches/0040-ggml-operation-ATTN_SCORE.patch"

PROBES = (
    Probe(
        name="ggml-operations",
        file="ggml/include/ggml.h",
        what="101 operations, `GLU` the last; the number stands in three static_asserts. Each new operation of "
        "upstream makes 0040 conflict: count on",
        why="`ATTN_SCORE` is the last value, so that no other moves",
        ours=(_OP_PATCH,),
        code="""
#include "ggml.h"
static_assert(GGML_OP_COUNT == 101 && GGML_OP_GLU == 100);
""",
        broken=("GGML_OP_GLU,", "GGML_OP_GLU, GGML_OP_NEW,"),
        texts=(
            Count("ggml/src/ggml.c", "GGML_OP_COUNT == 101", 2),
            Count("ggml/include/ggml-rpc.h", "GGML_OP_COUNT == 101", 1),
        ),
    ),
    Probe(
        name="ggml-cpu-dispatch",
        file="ggml/src/ggml-cpu/ggml-cpu.c",
        what="an operation has a case in `ggml_compute_forward`, `ggml_get_n_tasks` and `ggml_graph_plan`",
        why="`ATTN_SCORE` on the CPU",
        ours=(_OP_PATCH, "ggml/cpu/attn-score.h"),
        texts=(
            Order(
                "ggml/src/ggml-cpu/ggml-cpu.c",
                (
                    "static void ggml_compute_forward(struct ggml_compute_params * params, struct ggml_tensor * "
                    "tensor)",
                    "case GGML_OP_LIGHTNING_INDEXER:",
                    "static int ggml_get_n_tasks(struct ggml_tensor * node, int n_threads)",
                    "case GGML_OP_LIGHTNING_INDEXER: { n_tasks = n_threads; } break;",
                    "struct ggml_cplan ggml_graph_plan(",
                    "default: break; }",
                ),
            ),
        ),
    ),
    Probe(
        name="ggml-cpu-kernel",
        file="ggml/src/ggml-cpu/ggml-cpu-impl.h",
        what="`ggml_compute_params` (`ith`, `nth`, `wsize`, `wdata`, `threadpool`, `use_ref`), `ggml_barrier`, "
        "`vec.h`, `simd-mappings.h`, `CACHE_LINE_SIZE` of `ops.h`",
        why="the kernel for the CPU",
        ours=("ggml/cpu/attn-score.cpp",),
        code="""
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ops.h"
#include "simd-mappings.h"
#include "vec.h"
HAS(ggml_compute_params::ith, int);
HAS(ggml_compute_params::nth, int);
HAS(ggml_compute_params::wsize, size_t);
HAS(ggml_compute_params::wdata, void *);
HAS(ggml_compute_params::threadpool, ggml_threadpool *);
HAS(ggml_compute_params::use_ref, bool);
void probe(ggml_compute_params & params, float * y, const float * x) {
    ggml_barrier(params.threadpool);
    ggml_vec_add_f32(1, y, y, x);
    ggml_vec_mad_f32(1, y, x, 1.0f);
    y[0] = (float) ggml_vec_soft_max_f32(1, y, x, 0.0f);
#if defined(GGML_SIMD) && !defined(__ARM_FEATURE_SVE) && !defined(__riscv_v_intrinsic)
    GGML_F32_VEC v = GGML_F32_VEC_ZERO;
    v = GGML_F32_VEC_FMA(v, GGML_F32_VEC_LOAD(x), GGML_F32_VEC_SET1(1.0f));
    GGML_F32_VEC_STORE(y, v);
    static_assert(GGML_F32_EPR >= 1);
#endif
}
static_assert(CACHE_LINE_SIZE >= 64);
""",
        broken=("bool use_ref;", "int mode;"),
    ),
    Probe(
        name="ggml-backends",
        file="ggml/src/ggml-backend.cpp",
        what="plain host memory is a buffer type without a device; the operations that get memory behind their "
        "result are listed in `ggml_op_alloc_size_may_expand`",
        why="which device scores keys of the host copy; memory of the Metal kernels",
        ours=("src/llama-dge-attn.cpp", "ggml/metal/ggml-metal-attn-score.cpp"),
        texts=(
            Order(
                "ggml/src/ggml-backend.cpp",
                (
                    "bool ggml_op_alloc_size_may_expand(enum ggml_op op) { switch (op) {",
                    "return true;",
                    "ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void) {",
                    "/* .device = */ NULL,",
                ),
            ),
        ),
    ),
    Probe(
        name="ggml-host-tensors",
        file="ggml/src/ggml-alloc.c",
        what="the allocator leaves tensors alone whose `data` is set; the CPU backend computes on them without a "
        "buffer",
        why="scores of keys in the host copy",
        ours=("src/llama-dge-selector.cpp",),
        texts=(
            Order(
                "ggml/src/ggml-alloc.c",
                ("static bool ggml_gallocr_is_allocated(", "return t->data != NULL"),
            ),
        ),
    ),
    Probe(
        name="ggml-cuda",
        file="ggml/src/ggml-cuda/ggml-cuda.cu",
        what="an operation has a case in `ggml_cuda_compute_forward` and in `..._device_supports_op`; "
        "`common.cuh` has the context's `pool`, `stream` and `device`",
        why="`ATTN_SCORE` on CUDA",
        ours=("../patches/0060-ggml-cuda-operation-ATTN_SCORE.patch", "ggml/cuda/attn-score.cu"),
        texts=(
            Order(
                "ggml/src/ggml-cuda/ggml-cuda.cu",
                (
                    "static bool ggml_cuda_compute_forward(ggml_backend_cuda_context & ctx, struct ggml_tensor * "
                    "dst) {",
                    "static bool ggml_backend_cuda_device_supports_op(",
                ),
            ),
            Order(
                "ggml/src/ggml-cuda/common.cuh", ("struct ggml_cuda_pool_alloc {", "struct ggml_backend_cuda_context {")
            ),
        ),
    ),
    Probe(
        name="ggml-metal",
        file="ggml/src/ggml-metal/ggml-metal-device.h",
        what="libraries from source, pipelines, the encoder, `ggml_metal_buffer_get_id`, properties of the device",
        why="`ATTN_SCORE` on Metal, in a library of its own",
        ours=("../patches/0080-ggml-metal-operation-ATTN_SCORE.patch", "ggml/metal/ggml-metal-attn-score.cpp"),
        code="""
#include "ggml-metal/ggml-metal-device.h"
void probe(ggml_metal_device_t dev, ggml_metal_encoder_t enc, ggml_metal_buffer_t buf, const ggml_tensor * t) {
    ggml_metal_library_t lib = ggml_metal_library_init_from_source(dev, "", true);
    ggml_metal_pipeline_with_params pipeline = ggml_metal_library_get_pipeline(lib, "");
    if (!pipeline.pipeline) {
        pipeline = ggml_metal_library_compile_pipeline(lib, "", "", nullptr);
    }
    if (ggml_metal_pipeline_max_theads_per_threadgroup(pipeline) < 1) {
        return;
    }
    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes(enc, nullptr, 0, 0);
    ggml_metal_encoder_set_buffer(enc, ggml_metal_buffer_get_id(buf, t), 0);
    ggml_metal_encoder_set_threadgroup_memory_size(enc, 0, 0);
    ggml_metal_encoder_dispatch_threadgroups(enc, 1, 1, 1, 1, 1, 1);
    ggml_metal_encoder_memory_barrier(enc);
}
HAS(&ggml_metal_device_get_props, const ggml_metal_device_props * (*)(ggml_metal_device_t));
HAS(ggml_metal_device_props::has_simdgroup_reduction, bool);
HAS(ggml_metal_device_props::max_theadgroup_memory_size, size_t);
""",
        broken=("size_t max_theadgroup_memory_size;", "size_t max_threadgroup_memory_size;"),
        texts=(
            Order(
                "ggml/src/ggml-metal/ggml-metal-device.m",
                (
                    "#include <Foundation/Foundation.h>",
                    "static bool ggml_metal_supports_mul_mat_op(",
                    "bool ggml_metal_device_supports_op(ggml_metal_device_t dev, const struct ggml_tensor * op) {",
                ),
            ),
            Order(
                "ggml/src/ggml-metal/ggml-metal-ops.cpp",
                ("static int ggml_metal_op_encode_impl(ggml_metal_op_t ctx, int idx) {",),
            ),
            Order(
                "ggml/src/ggml-metal/ggml-metal.cpp", ("static size_t ggml_backend_metal_buffer_type_get_alloc_size(",)
            ),
        ),
    ),
    Probe(
        name="ggml-vulkan",
        file="ggml/src/ggml-vulkan/ggml-vulkan-common.h",
        what="`ggml_vk_dispatch_pipeline` writes only those descriptors of a set that an operation has",
        why="0070, which goes when upstream writes all of them, or when lavapipe 22.3 is gone",
        ours=("../patches/0070-ggml-vulkan-sets-of-descriptors-without-buffers-that.patch",),
        texts=(
            Order(
                "ggml/src/ggml-vulkan/ggml-vulkan-common.h",
                (
                    "inline void ggml_vk_dispatch_pipeline(",
                    "vk::WriteDescriptorSet write_descriptor_set{ descriptor_set, 0, 0, pipeline->parameter_count,",
                ),
            ),
        ),
    ),
    Probe(
        name="ggml-amx",
        file="ggml/src/ggml-cpu/amx/mmq.cpp",
        what="`_tile_loadconfig` reads sizes from the stack",
        why="`amx-compat.h`, which goes when the oldest GCC that we support no longer drops them",
        ours=("ggml/cpu/amx-compat.h", "ggml/CMakeLists.txt"),
        texts=(Order("ggml/src/ggml-cpu/amx/mmq.cpp", ("_tile_loadconfig(&tc);",)),),
    ),
)
