#include "llama-dge-gather.h"

#include "llama-dge-fault.h"

#include "llama-impl.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

// Rows are gathered as words of 32 bits, whatever the type of the cache: quantized blocks move as they are, and no device
// takes a word for a number that it could round. The host moves the rows where a head's row is not a number of words.
static constexpr size_t LLAMA_DGE_WORD = sizeof(int32_t);

// one copy each
static constexpr size_t LLAMA_DGE_GATHER_RUNS = 256;

// the bytes of t seen otherwise
static ggml_tensor * llama_dge_alias(ggml_context * ctx, ggml_tensor * t, ggml_type type, std::array<int64_t, 3> ne,
        std::array<size_t, 2> nb, size_t offset = 0) {
    ggml_tensor * res = ggml_view_tensor(ctx, t);

    res->type   = type;
    res->op     = GGML_OP_VIEW;
    res->src[0] = t;

    std::copy(ne.begin(), ne.end(), res->ne);
    res->ne[3] = 1;

    res->nb[0] = ggml_type_size(type);
    res->nb[1] = nb[0];
    res->nb[2] = nb[1];
    res->nb[3] = nb[1] * ne[2];

    res->view_offs += offset;

    return res;
}

// memory of the buffer for what has none
static bool llama_dge_assign(ggml_context * ctx, ggml_backend_buffer_t buf) {
    auto alloc = ggml_tallocr_new(buf);

    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        const auto status = t->view_src ? ggml_backend_view_init(t) : ggml_tallocr_alloc(&alloc, t);

        if (status != GGML_STATUS_SUCCESS) {
            return false;
        }
    }

    return true;
}

static size_t llama_dge_place_size(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const size_t align = ggml_backend_buft_get_alignment(buft);

    size_t res = align;

    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        res += t->view_src ? 0 : GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), align);
    }

    return res;
}

llama_dge_gather::llama_dge_gather(ggml_backend_sched_t sched, const llama_dge_moves & moves) :
    sched(sched), moves(moves) {
    for (const uint32_t cell : moves.cells) {
        n_cells = std::max<int64_t>(n_cells, cell + 1);
    }
}

int llama_dge_gather::find_device(const llama_dge_gather_layer & layer) {
    const char * env = getenv("LLAMA_DGE_GATHER");

    if ((env && strcmp(env, "host") == 0) || moves.dst.empty() || moves.runs.size() > LLAMA_DGE_GATHER_RUNS) {
        return -1;
    }

    auto * buf  = layer.k->buffer;
    auto * buft = ggml_backend_buffer_get_type(buf);
    auto * dev  = ggml_backend_buft_get_device(buft);

    // for tests: the CPU takes the place of a device
    const bool cpu = env && strcmp(env, "cpu") == 0;

    if (cpu && !dev) {
        dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }

    // graphs on others may be stopped by the user's abort callback
    const auto type = dev ? ggml_backend_dev_type(dev) : GGML_BACKEND_DEVICE_TYPE_CPU;
    const bool gpu  = (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) &&
                      !ggml_backend_buffer_is_host(buf);

    if ((!gpu && !cpu) || ggml_backend_buffer_get_type(layer.v->buffer) != buft) {
        return -1;
    }

    for (const size_t size : { layer.size_k, layer.size_v, layer.k->nb[1], layer.v->nb[1] }) {
        if (size % LLAMA_DGE_WORD != 0) {
            return -1;
        }
    }

    for (size_t i = 0; i < devices.size(); ++i) {
        if (devices[i].buft == buft) {
            return i;
        }
    }

    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        auto * backend = ggml_backend_sched_get_backend(sched, i);

        if (ggml_backend_get_device(backend) == dev) {
            devices.push_back({ backend, buft, nullptr });
            return devices.size() - 1;
        }
    }

    return -1;
}

void llama_dge_gather::add(const llama_dge_gather_layer & layer) {
    items.push_back({ layer, find_device(layer) });

    if (!takes(items.size() - 1)) {
        return;
    }

    for (const auto & head : moves.kept[items.size() - 1]) {
        const int64_t n_words = std::max(layer.size_k, layer.size_v) / LLAMA_DGE_WORD;

        // one row more, for the rehearsal
        if (head.size() < moves.n_cap) {
            n_zero = std::max<int64_t>(n_zero, n_words * (moves.n_cap - head.size() + 1));
        }
    }
}

size_t llama_dge_gather::n_taken() const {
    return std::count_if(items.begin(), items.end(), [](const auto & item) { return item.slot >= 0; });
}

ggml_cgraph * llama_dge_gather::build(size_t i, bool rehearsal) {
    const auto & layer = items[i].layer;

    const size_t n_nodes = 2 * (16 + 3 * layer.n_head + 3 * moves.runs.size());
    const size_t n_bytes = (n_nodes + 2) * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false);

    ctx.reset(ggml_init({ n_bytes, nullptr, true }));

    auto * gf = ggml_new_graph_custom(ctx.get(), n_nodes, false);

    // first, so that all layers have it in one place
    zero = n_zero > 0 ? ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n_zero) : nullptr;
    rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, moves.dst.size(), layer.n_head);

    build_rows(gf, layer.k, i, layer.size_k, false, rehearsal);
    build_rows(gf, layer.v, i, layer.size_v, layer.v_trans, rehearsal);

    return gf;
}

void llama_dge_gather::build_rows(
        ggml_cgraph * gf, ggml_tensor * t, size_t i, size_t size, bool trans, bool rehearsal) {
    auto * ctx = this->ctx.get();

    const int64_t n_head  = items[i].layer.n_head;
    const int64_t n_keep  = moves.dst.size();
    const int64_t n_words = size / LLAMA_DGE_WORD;

    const size_t  size_el  = ggml_type_size(t->type);
    const int64_t n_embd   = size / size_el;     // of a head; of a transposed cache only, which is not quantized
    const size_t  size_all = t->ne[1] * size_el; // of one element in all cells, likewise

    ggml_tensor * from = t;

    if (trans) {
        from = llama_dge_alias(
                ctx, t, t->type, { n_cells, n_embd * n_head, 1 }, { size_all, size_all * n_embd * n_head });
        from = ggml_cont(ctx, ggml_transpose(ctx, from));
    }

    from = llama_dge_alias(ctx, from, GGML_TYPE_I32, { n_words, n_cells, n_head }, { from->nb[1], size });

    ggml_tensor * cur = ggml_get_rows(ctx, from, rows); // [n_words, n_keep, n_head]
    ggml_build_forward_expand(gf, cur);

    for (int64_t ih = 0; ih < n_head; ++ih) {
        const int64_t n_rows = moves.kept[i][ih].size();
        const int64_t n_less = moves.n_cap - n_rows;

        if (n_less == 0) {
            continue;
        }

        // the rehearsal also makes such a copy, but of zeros over zeros
        ggml_tensor * a = ggml_view_1d(ctx, zero, n_words * (rehearsal ? 1 : n_less), 0);
        ggml_tensor * b = rehearsal ? ggml_view_1d(ctx, zero, n_words, n_words * LLAMA_DGE_WORD)
                                    : ggml_view_1d(ctx, cur, n_words * n_less, ih * cur->nb[2] + n_rows * cur->nb[1]);

        ggml_build_forward_expand(gf, ggml_cpy(ctx, a, b));
    }

    if (trans) {
        cur = llama_dge_alias(ctx, cur, t->type, { n_embd, n_keep, n_head }, { size, size * n_keep });
        cur = ggml_cont(ctx, ggml_transpose(ctx, cur)); // [n_keep, n_embd, n_head]
    }

    for (const auto & [i0, n_run] : moves.runs) {
        const int64_t n    = n_run;
        const size_t  cell = moves.dst[i0];

        ggml_tensor * a;
        ggml_tensor * b;

        if (trans) {
            a = ggml_view_2d(ctx, cur, n, n_embd * n_head, cur->nb[1], i0 * size_el);
            b = llama_dge_alias(ctx, t, t->type, { n, n_embd * n_head, 1 }, { size_all, size_all * n_embd * n_head },
                    cell * size_el);
        } else {
            a = ggml_view_3d(ctx, cur, n_words, n, n_head, cur->nb[1], cur->nb[2], i0 * cur->nb[1]);
            b = llama_dge_alias(ctx, t, GGML_TYPE_I32, { n_words, n, n_head }, { t->nb[1], size }, cell * t->nb[1]);
        }

        ggml_build_forward_expand(gf, ggml_cpy(ctx, a, b));
    }
}

void llama_dge_gather::prepare() {
    for (size_t i = 0; i < items.size(); ++i) {
        if (!takes(i)) {
            continue;
        }

        auto & device = devices[items[i].slot];
        auto * gf     = build(i, false);

        data.reserve(std::max(data.capacity(), (size_t) ggml_nelements(rows)));

        for (int j = 0; j < ggml_graph_n_nodes(gf); ++j) {
            if (!ggml_backend_supports_op(device.backend, ggml_graph_node(gf, j))) {
                items[i].slot = -1;
                break;
            }
        }
        if (takes(i)) {
            device.size = std::max(device.size, llama_dge_place_size(ctx.get(), device.buft));
        }
    }

    for (size_t slot = 0; slot < devices.size(); ++slot) {
        auto & device = devices[slot];

        const auto first =
                std::find_if(items.begin(), items.end(), [&](const auto & item) { return item.slot == (int) slot; });
        if (first == items.end()) {
            continue;
        }

        if (!llama_dge_alloc_fails()) {
            device.buf.reset(ggml_backend_buft_alloc_buffer(device.buft, device.size));
        }
        if (device.buf) {
            ggml_backend_buffer_clear(device.buf.get(), 0);
        }

        // Rows that have moved cannot go back. So the device shows first that it can do it: it puts rows where they are
        if (!device.buf || !compute(first - items.begin(), true)) {
            LLAMA_LOG_WARN("%s: rows on %s move by way of the host: %s\n", __func__, ggml_backend_name(device.backend),
                    device.buf ? "its graph failed" : "no memory for a layer's rows");

            for (auto & item : items) {
                item.slot = item.slot == (int) slot ? -1 : item.slot;
            }
        }
    }
}

bool llama_dge_gather::compute(size_t i, bool rehearsal) {
    auto & device = devices[items[i].slot];
    auto * gf     = build(i, rehearsal);

    if (!llama_dge_assign(ctx.get(), device.buf.get())) {
        return false;
    }

    data.clear();
    for (const auto & head : moves.kept[i]) {
        for (size_t r = 0; r < moves.dst.size(); ++r) {
            const int64_t cell = rehearsal ? moves.dst[r] : moves.src(head, r);

            // a row that is not there is cleared afterwards, so any will do
            data.push_back(cell >= 0 ? (int32_t) cell : 0);
        }
    }

    ggml_backend_tensor_set(rows, data.data(), 0, ggml_nbytes(rows));

    return ggml_backend_graph_compute(device.backend, gf) == GGML_STATUS_SUCCESS && !llama_dge_move_fails();
}

bool llama_dge_gather::move(size_t i) {
    if (compute(i, false)) {
        return true;
    }

    LLAMA_LOG_ERROR("%s: the graph failed on %s\n", __func__, ggml_backend_name(devices[items[i].slot].backend));

    return false;
}
