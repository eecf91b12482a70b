#pragma once

// Stands in for ggml-metal's Objective-C: a device whose kernels are those of attn-score.metal, compiled for the CPU. All
// else of ggml-metal is C++ and is what a Mac runs. Dispatches wait for the next barrier and then run last first, so that a
// missing barrier shows. Buffers and threadgroup memory are as large as was asked for, which the address sanitizer knows.
//
// Included behind the library's headers, ggml's and the converted kernels, whose words are macros from there on.

struct ggml_metal_device { // as in metal_supports.py
    ggml_metal_device_props props;
};

struct ggml_metal_buffer {
    char * data;
    size_t size;
};

struct ggml_metal_pipeline {
    std::string name;
    int         n_threads;
};

struct ggml_metal_library {
    std::set<std::string>                      names; // of the kernels in the source
    std::map<std::string, ggml_metal_pipeline> pipelines;
};

// what the next library is to be
static bool        mock_compiles  = true;
static int         mock_n_threads = 1024;
static std::string mock_missing; // a kernel that makes no pipeline

static int         mock_n_compiled = 0;
static std::string mock_source;

static ggml_metal_device mock_device;

// --- one dispatch

struct mock_call {
    const ggml_metal_pipeline * pipeline = nullptr;
    std::vector<char>           bytes;
    ggml_metal_buffer_id        buffers[8] = {};
    size_t                      shared     = 0;
    dim3                        grid;
    dim3                        block;

    attn_score_kargs args() const {
        GGML_ASSERT(bytes.size() == sizeof(attn_score_kargs));
        attn_score_kargs res;
        memcpy(&res, bytes.data(), sizeof(res));
        return res;
    }

    template <typename T>
    T * buffer(int i) const {
        GGML_ASSERT(buffers[i].metal);
        GGML_ASSERT(buffers[i].offs % alignof(T) == 0);
        return (T *) ((char *) buffers[i].metal + buffers[i].offs);
    }

    template <typename F>
    void run(F body) const {
        std::vector<float4> mem(shared / sizeof(float4), float4 { NAN, NAN, NAN, NAN });
        shim::launch([&](int) { body(mem.data(), uint3 { blockIdx.x, blockIdx.y, blockIdx.z }, threadIdx.x); }, grid,
                block, 0);
    }
};

template <typename K>
static void mock_rows(const mock_call & c) {
    const auto args = c.args();
    c.run([&](float4 * shared, uint3 group, ushort id) {
        kernel_attn_score_rows<K>(
                args, c.buffer<char>(1), c.buffer<char>(2), c.buffer<char>(3), c.buffer<float2>(4), shared, group, id);
    });
}

static void mock_combine(const mock_call & c) {
    const auto args = c.args();
    c.run([&](float4 *, uint3 group, ushort id) {
        kernel_attn_score_combine(
                args, c.buffer<float2>(1), c.buffer<float>(2), c.buffer<float>(3), c.buffer<float2>(4), group, id);
    });
}

template <typename K>
static void mock_columns(const mock_call & c) {
    const auto args = c.args();
    c.run([&](float4 * shared, uint3 group, ushort id) {
        kernel_attn_score_columns<K>(args, c.buffer<char>(1), c.buffer<char>(2), c.buffer<char>(3), c.buffer<float2>(4),
                c.buffer<char>(5), shared, group, id);
    });
}

#define MOCK_TYPE(type)                                                                                                \
    { "kernel_attn_score_rows_" #type, mock_rows<attn_score_##type> }, {                                               \
        "kernel_attn_score_columns_" #type, mock_columns<attn_score_##type>                                            \
    }

static const std::map<std::string, void (*)(const mock_call &)> mock_kernels = {
    MOCK_TYPE(f32),
    MOCK_TYPE(f16),
    MOCK_TYPE(bf16),
    MOCK_TYPE(q8_0),
    MOCK_TYPE(q4_0),
    MOCK_TYPE(q4_1),
    MOCK_TYPE(q5_0),
    MOCK_TYPE(q5_1),
    { "kernel_attn_score_combine", mock_combine },
};

struct ggml_metal_encoder {
    mock_call              next;
    std::vector<mock_call> waiting;

    void flush() {
        for (; !waiting.empty(); waiting.pop_back()) {
            mock_kernels.at(waiting.back().pipeline->name)(waiting.back());
        }
    }
};

// --- ggml-metal-device.m

extern "C" {

ggml_metal_device_t ggml_metal_device_init(int, int) {
    return &mock_device;
}

void ggml_metal_device_free(ggml_metal_device_t) {}

const ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t dev) {
    return &dev->props;
}

ggml_metal_library_t ggml_metal_device_get_library(ggml_metal_device_t) {
    return nullptr;
}

ggml_metal_library_t ggml_metal_library_init_from_source(ggml_metal_device_t, const char * source, bool) {
    mock_n_compiled++;
    mock_source = source;
    if (!mock_compiles) {
        return nullptr;
    }

    auto * res = new ggml_metal_library;

    // templates are known by their host names, others by their own
    for (const std::string mark : { "host_name(\"", "\nkernel void " }) {
        for (size_t i = 0; (i = mock_source.find(mark, i)) != std::string::npos;) {
            i += mark.size();
            res->names.insert(mock_source.substr(i, mock_source.find_first_of("\"(", i) - i));
        }
    }

    return res;
}

ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t lib, const char * name) {
    ggml_metal_pipeline_with_params res = {};

    const auto it = lib->pipelines.find(name);
    res.pipeline  = it != lib->pipelines.end() ? &it->second : nullptr;

    return res;
}

ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(
        ggml_metal_library_t lib, const char * base, const char * name, ggml_metal_cv_t) {
    ggml_metal_pipeline_with_params res = {};

    if (lib->names.count(base) && mock_missing != base) {
        res.pipeline = &(lib->pipelines[name] = { base, mock_n_threads });
    }

    return res;
}

int ggml_metal_pipeline_max_theads_per_threadgroup(ggml_metal_pipeline_with_params pipeline) {
    return pipeline.pipeline->n_threads;
}

ggml_metal_encoder_t ggml_metal_encoder_init(ggml_metal_cmd_buf_t, bool) {
    return new ggml_metal_encoder;
}

void ggml_metal_encoder_free(ggml_metal_encoder_t enc) {
    delete enc;
}

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t enc, ggml_metal_pipeline_with_params pipeline) {
    enc->next.pipeline = pipeline.pipeline;
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t enc, void * data, size_t size, int idx) {
    GGML_ASSERT(idx == 0);
    enc->next.bytes.assign((char *) data, (char *) data + size);
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t enc, ggml_metal_buffer_id buffer, int idx) {
    enc->next.buffers[idx] = buffer;
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t enc, size_t size, int idx) {
    GGML_ASSERT(idx == 0 && size % 16 == 0);
    enc->next.shared = size;
}

void ggml_metal_encoder_dispatch_threadgroups(
        ggml_metal_encoder_t enc, int tg0, int tg1, int tg2, int tptg0, int tptg1, int tptg2) {
    GGML_ASSERT(tptg0 * tptg1 * tptg2 <= enc->next.pipeline->n_threads);
    enc->next.grid  = dim3(tg0, tg1, tg2);
    enc->next.block = dim3(tptg0, tptg1, tptg2);
    enc->waiting.push_back(enc->next);
}

void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t enc) {
    enc->flush();
}

void ggml_metal_encoder_end_encoding(ggml_metal_encoder_t enc) {
    enc->flush();
}

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t, size_t size, bool) {
    return new ggml_metal_buffer { (char *) malloc(size), size };
}

void ggml_metal_buffer_free(ggml_metal_buffer_t buf) {
    free(buf->data);
    delete buf;
}

void * ggml_metal_buffer_get_base(ggml_metal_buffer_t buf) {
    return buf->data;
}

bool ggml_metal_buffer_is_shared(ggml_metal_buffer_t) {
    return true;
}

ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t buf, const ggml_tensor * t) {
    return { buf->data, (size_t) ((char *) t->data - buf->data) };
}

// --- ggml-backend-meta.cpp

bool ggml_backend_buft_is_meta(ggml_backend_buffer_type_t) {
    return false;
}

bool ggml_backend_buffer_is_meta(ggml_backend_buffer_t) {
    return false;
}

} // extern "C"
