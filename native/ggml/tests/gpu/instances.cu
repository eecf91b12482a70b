// Every kernel of ATTN_SCORE for every type of K, without ggml: `make test-cuda-compile` compiles this for all
// architectures and looks at registers, shared memory and spills.

#include <cuda_runtime.h>

#include "../../cuda/attn-score-kernels.cuh"
#include "../../cuda/attn-score-mma.cuh"

template <typename K>
static void launch(const attn_score_args & a, cudaStream_t stream) {
    attn_score_launch<K>(a, [stream](auto kernel, dim3 grid, dim3 block, const attn_score_args & args) {
        kernel<<<grid, block, 0, stream>>>(args);
    });
}

template <typename K>
static void launch_mma(const attn_score_args & a, cudaStream_t stream) {
    attn_score_mma_launch<K>(a, [stream](auto kernel, dim3 grid, dim3 block, const attn_score_args & args) {
        kernel<<<grid, block, 0, stream>>>(args);
    });
}

void attn_score_all(const attn_score_args & a, cudaStream_t stream) {
    launch<attn_score_f32>(a, stream);
    launch<attn_score_f16>(a, stream);
    launch<attn_score_bf16>(a, stream);
    launch<attn_score_q8_0>(a, stream);
    launch<attn_score_q4_0>(a, stream);
    launch<attn_score_q4_1>(a, stream);
    launch<attn_score_q5_0>(a, stream);
    launch<attn_score_q5_1>(a, stream);

    launch_mma<attn_score_mma_f16>(a, stream);
    launch_mma<attn_score_mma_q8_0>(a, stream);
    launch_mma<attn_score_mma_q4_0>(a, stream);
    launch_mma<attn_score_mma_q4_1>(a, stream);
    launch_mma<attn_score_mma_q5_0>(a, stream);
    launch_mma<attn_score_mma_q5_1>(a, stream);
}
