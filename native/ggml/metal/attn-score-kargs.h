#pragma once

// What the host of ATTN_SCORE and its Metal kernels have to agree on. Both include this, so it includes nothing: the host
// brings stdint.h, and Metal knows these types.

#define ATTN_SCORE_THREADS 128   // per threadgroup
#define ATTN_SCORE_KEYS    64    // of a tile
#define ATTN_SCORE_ROWS    32    // of a tile
#define ATTN_SCORE_SHARED  13824 // bytes of threadgroup memory; not in the combine kernel

typedef struct {
    uint64_t nbq1;
    uint64_t nbq2;
    uint64_t nbq3;
    uint64_t nbk1;
    uint64_t nbk2;
    uint64_t nbk3;
    uint64_t nbm1;
    uint64_t nbm3;
    uint64_t nbd1;
    uint64_t nbd2;
    int32_t  d;
    int32_t  n_kv;
    int32_t  n_q;
    int32_t  n_head_kv;
    int32_t  n_group; // heads per KV head
    int32_t  n_seq;
    int32_t  n_split;
    int32_t  mask;  // 0: none, 1: f16, 2: f32
    int32_t  sinks; // what is 0 here is not read there
    int32_t  weights;
    int32_t  acc;
    float    scale;
    float    logit_softcap;
    float    norm;
} attn_score_kargs;

static_assert(sizeof(attn_score_kargs) == 136, "host and kernels must see the same struct");
