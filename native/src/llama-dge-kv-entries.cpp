#include "llama-dge-kv.h"

#include "llama-dge-fault.h"

#include <algorithm>
#include <cstring>

// Bytes of entries: between the cache and host memory, and inside the cache. Blocks of quantized types move as they are.

llama_dge_moves::llama_dge_moves(const std::vector<uint32_t> & cells, const llama_dge_kept & kept, size_t n_past) :
    cells(cells), kept(kept), n_past(n_past), n_cap(llama_dge_capacity(kept)), dst(cells) {
    std::sort(dst.begin(), dst.end());
    dst.resize(n_cap + cells.size() - n_past); // behind the past: window, draft and what came after

    runs = llama_dge_find_runs(dst);
}

int64_t llama_dge_moves::src(const llama_dge_rows & rows, size_t r) const {
    if (r >= n_cap) {
        return cells[n_past + (r - n_cap)];
    }
    return r < rows.size() ? (int64_t) cells[rows[r]] : -1;
}

//
// lanes
//

// part of each row: bytes [offset, offset + size); el: bytes of an element where the tensor is transposed, else 0
static std::vector<llama_dge_lane> llama_dge_make_lanes(
        size_t size_row, size_t offset, size_t size, size_t el, size_t n_cells) {
    std::vector<llama_dge_lane> res;

    if (el == 0) {
        res.push_back({ offset, size_row, size });
    }
    for (size_t j = offset; el > 0 && j < offset + size; j += el) {
        res.push_back({ j * n_cells, el, el });
    }

    return res;
}

std::vector<llama_dge_lane> llama_dge_kv::lanes_k(size_t i, size_t n_cells) const {
    return llama_dge_make_lanes(shapes[i].size_k, 0, shapes[i].size_k, 0, n_cells);
}

std::vector<llama_dge_lane> llama_dge_kv::lanes_v(size_t i, size_t n_cells) const {
    const size_t el = cache.v_trans ? ggml_type_size(shapes[i].type_v) : 0;

    return llama_dge_make_lanes(shapes[i].size_v, 0, shapes[i].size_v, el, n_cells);
}

std::vector<llama_dge_lane> llama_dge_kv::head_lanes_k(size_t i, int64_t ih, size_t n_cells) const {
    const size_t size = shapes[i].size_k / shapes[i].n_head_kv;

    return llama_dge_make_lanes(shapes[i].size_k, ih * size, size, 0, n_cells);
}

std::vector<llama_dge_lane> llama_dge_kv::head_lanes_v(size_t i, int64_t ih, size_t n_cells) const {
    const size_t el   = cache.v_trans ? ggml_type_size(shapes[i].type_v) : 0;
    const size_t size = shapes[i].size_v / shapes[i].n_head_kv;

    return llama_dge_make_lanes(shapes[i].size_v, ih * size, size, el, n_cells);
}

//
// host data
//

static bool llama_dge_is_host(const ggml_tensor * t) {
    return ggml_backend_buffer_is_host(t->view_src ? t->view_src->buffer : t->buffer);
}

static void llama_dge_put(ggml_tensor * t, const uint8_t * data, size_t offset, size_t size) {
    if (llama_dge_is_host(t)) {
        memcpy((uint8_t *) t->data + offset, data, size);
    } else {
        ggml_backend_tensor_set(t, data, offset, size);
    }
}

static const uint8_t * llama_dge_host_data(const ggml_tensor * t, std::vector<uint8_t> & copy) {
    if (llama_dge_is_host(t)) {
        return (const uint8_t *) t->data;
    }

    copy.resize(ggml_nbytes(t));
    ggml_backend_tensor_get(t, copy.data(), 0, copy.size());

    return copy.data();
}

bool llama_dge_kv::is_host(size_t i) const {
    return ggml_backend_buffer_is_host(buffer(i));
}

void llama_dge_kv::host_reserve(size_t i, uint32_t strm, host_data & data) const {
    if (!is_host(i)) {
        data.copy_k.reserve(std::max(data.copy_k.capacity(), ggml_nbytes(k(i, strm))));
        data.copy_v.reserve(std::max(data.copy_v.capacity(), ggml_nbytes(v(i, strm))));
    }
}

void llama_dge_kv::host_read(size_t i, uint32_t strm, host_data & data) const {
    data.k = llama_dge_host_data(k(i, strm), data.copy_k);
    data.v = llama_dge_host_data(v(i, strm), data.copy_v);
}

//
// host copy
//

size_t llama_dge_kv::entries_bytes_k(size_t i, size_t n_cap) const {
    return shapes[i].size_k * n_cap;
}

size_t llama_dge_kv::entries_bytes_v(size_t i, size_t n_cap) const {
    return shapes[i].size_v * n_cap;
}

void llama_dge_kv::read(size_t i, uint32_t strm, const std::vector<uint32_t> & cells, const llama_dge_entries & dst,
        size_t row0, const host_data * data) const {
    const auto runs = llama_dge_find_runs(cells);

    const auto gather = [&](uint8_t * out, const ggml_tensor * t, const uint8_t * src,
                                const std::vector<llama_dge_lane> & from, const std::vector<llama_dge_lane> & to) {
        std::vector<uint8_t> copy;

        // from a device, only what is wanted, unless that takes many small copies
        const bool direct = !src && !llama_dge_is_host(t) && from.size() * runs.size() <= 16;

        if (!src && !direct) {
            src = llama_dge_host_data(t, copy);
        }

        for (size_t j = 0; j < from.size(); ++j) {
            for (const auto & [r, n] : runs) {
                const size_t offset = from[j].offset + cells[r] * from[j].stride;

                uint8_t * end = out + to[j].offset + (row0 + r) * to[j].stride;

                if (direct) {
                    ggml_backend_tensor_get(t, end, offset, n * from[j].stride);
                } else {
                    memcpy(end, src + offset, n * from[j].stride);
                }
            }
        }
    };

    gather(dst.k, k(i, strm), data ? data->k : nullptr, lanes_k(i, size()), lanes_k(i, dst.n_cap));
    gather(dst.v, v(i, strm), data ? data->v : nullptr, lanes_v(i, size()), lanes_v(i, dst.n_cap));
}

void llama_dge_kv::write(
        size_t i, uint32_t strm, const std::vector<uint32_t> & cells, const llama_dge_entries & src) const {
    const auto runs = llama_dge_find_runs(cells);

    const auto scatter = [&](ggml_tensor * t, const uint8_t * data, const std::vector<llama_dge_lane> & from,
                                 const std::vector<llama_dge_lane> & to) {
        for (size_t j = 0; j < from.size(); ++j) {
            for (const auto & [r, n] : runs) {
                ggml_backend_tensor_set(t, data + from[j].offset + r * from[j].stride,
                        to[j].offset + cells[r] * to[j].stride, n * to[j].stride);
            }
        }
    };

    scatter(k(i, strm), src.k, lanes_k(i, src.n_cap), lanes_k(i, size()));
    scatter(v(i, strm), src.v, lanes_v(i, src.n_cap), lanes_v(i, size()));
}

void llama_dge_kv::write_rows(size_t i, uint32_t strm, int64_t ih,
        const std::vector<std::pair<int32_t, uint32_t>> & rows, const llama_dge_entries & src) const {
    const auto put = [&](ggml_tensor * t, const uint8_t * data, const std::vector<llama_dge_lane> & from,
                             const std::vector<llama_dge_lane> & to) {
        for (size_t j = 0; j < from.size(); ++j) {
            for (const auto & [row, cell] : rows) {
                llama_dge_put(t, data + from[j].offset + row * from[j].stride, to[j].offset + cell * to[j].stride,
                        to[j].size);
            }
        }
    };

    put(k(i, strm), src.k, head_lanes_k(i, ih, src.n_cap), head_lanes_k(i, ih, size()));
    put(v(i, strm), src.v, head_lanes_v(i, ih, src.n_cap), head_lanes_v(i, ih, size()));
}

void llama_dge_kv::copy(size_t i, const llama_dge_entries & dst, const llama_dge_entries & src, size_t n_rows) const {
    const auto copy = [&](uint8_t * out, const uint8_t * data, const std::vector<llama_dge_lane> & from,
                              const std::vector<llama_dge_lane> & to) {
        for (size_t j = 0; j < from.size(); ++j) {
            memcpy(out + to[j].offset, data + from[j].offset, n_rows * from[j].stride);
        }
    };

    copy(dst.k, src.k, lanes_k(i, src.n_cap), lanes_k(i, dst.n_cap));
    copy(dst.v, src.v, lanes_v(i, src.n_cap), lanes_v(i, dst.n_cap));
}

//
// inside the cache
//

void llama_dge_kv::compact(size_t i, uint32_t strm, const llama_dge_moves & moves, const host_data & data,
        std::vector<uint8_t> & out) const {
    const size_t n_keep = moves.dst.size();

    // the result of a tensor: its kept rows, arranged as the tensor is for n_keep cells
    const auto move = [&](ggml_tensor * t, const uint8_t * src, const auto & head_lanes, const auto & all_lanes) {
        out.resize(shapes[i].size_k > shapes[i].size_v ? n_keep * shapes[i].size_k : n_keep * shapes[i].size_v);

        for (size_t ih = 0; ih < moves.kept[i].size(); ++ih) {
            const auto & rows = moves.kept[i][ih];
            const auto   from = head_lanes(ih, size());
            const auto   to   = head_lanes(ih, n_keep);

            for (size_t j = 0; j < from.size(); ++j) {
                for (size_t r = 0; r < n_keep; ++r) {
                    const int64_t cell = moves.src(rows, r);

                    uint8_t * end = out.data() + to[j].offset + r * to[j].stride;

                    if (cell >= 0) {
                        memcpy(end, src + from[j].offset + cell * from[j].stride, from[j].size);
                    } else {
                        memset(end, 0, from[j].size);
                    }
                }
            }
        }

        const auto from = all_lanes(n_keep);
        const auto to   = all_lanes(size());

        for (size_t j = 0; j < from.size(); ++j) {
            for (const auto & [r, n] : moves.runs) {
                ggml_backend_tensor_set(t, out.data() + from[j].offset + r * from[j].stride,
                        to[j].offset + moves.dst[r] * to[j].stride, n * to[j].stride);
            }
        }
    };

    move(
            k(i, strm), data.k, [&](int64_t ih, size_t n) { return head_lanes_k(i, ih, n); },
            [&](size_t n) { return lanes_k(i, n); });

    llama_dge_check_move();

    move(
            v(i, strm), data.v, [&](int64_t ih, size_t n) { return head_lanes_v(i, ih, n); },
            [&](size_t n) { return lanes_v(i, n); });
}

int32_t llama_dge_kv::poison(uint16_t pattern) {
    int32_t n_filled = 0;

    for (uint32_t strm = 0; strm < cache.n_stream; ++strm) {
        for (const uint32_t cell : free_cells(strm, size())) {
            n_filled++;

            for (size_t i = 0; i < shapes.size(); ++i) {
                const auto fill = [&](ggml_tensor * t, const std::vector<llama_dge_lane> & lanes) {
                    for (const auto & lane : lanes) {
                        std::vector<uint16_t> data((lane.size + 1) / 2, pattern);
                        ggml_backend_tensor_set(t, data.data(), lane.offset + cell * lane.stride, lane.size);
                    }
                };

                fill(k(i, strm), lanes_k(i, size()));
                fill(v(i, strm), lanes_v(i, size()));
            }
        }
    }

    return n_filled;
}
