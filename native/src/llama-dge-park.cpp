#include "llama-dge-park.h"

#include "llama-dge-impl.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#ifdef _WIN32
#include <process.h>
#else
#include <fcntl.h>
#include <unistd.h>
#endif

struct llama_dge_parked::file {
    explicit file(const std::string & path) : fp(std::fopen(path.c_str(), "rb")) {}
    explicit file(FILE * fp) : fp(fp) {}
    ~file() {
        if (fp) {
            std::fclose(fp);
        }
    }

    file(const file &)             = delete;
    file & operator=(const file &) = delete;

    FILE * fp;
};

uint64_t llama_dge_hash(uint64_t hash, const void * bytes, size_t size) {
    const auto * data = (const uint8_t *) bytes;

    const auto mix = [&](uint64_t word) {
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    };

    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, data + i, 8);
        mix(word);
    }
    for (; i < size; ++i) {
        mix(data[i]);
    }

    return hash;
}

static uint64_t llama_dge_hash_layer(const llama_dge_park_layer & layer, size_t size_k, size_t size_v) {
    return llama_dge_hash(llama_dge_hash(size_k, layer.k.get(), size_k), layer.v.get(), size_v);
}

llama_dge_parked::llama_dge_parked() = default;

llama_dge_parked::~llama_dge_parked() {
    out.reset();

    if (!path.empty()) {
        std::remove(path.c_str());
    }
}

bool llama_dge_parked::alloc(llama_dge_park_layer & layer, size_t n_cap, size_t n_keep) {
    if (llama_dge_alloc_fails()) {
        return false;
    }

    // not zeroed: pages that are not written to yet take no memory
    std::unique_ptr<uint8_t[]> k(new (std::nothrow) uint8_t[layer.size_k * n_cap]);
    std::unique_ptr<uint8_t[]> v(new (std::nothrow) uint8_t[layer.size_v * layer.n_v * n_cap]);

    if (!k || !v) {
        return false;
    }

    if (n_keep > 0) {
        memcpy(k.get(), layer.k.get(), layer.size_k * n_keep);

        for (size_t j = 0; j < layer.n_v; ++j) {
            memcpy(v.get() + j * n_cap * layer.size_v, layer.v.get() + j * layer.n_cap * layer.size_v,
                    n_keep * layer.size_v);
        }
    }

    layer.k     = std::move(k);
    layer.v     = std::move(v);
    layer.n_cap = n_cap;

    return true;
}

bool llama_dge_parked::alloc_largest(llama_dge_park_layer & buf) const {
    buf.n_v = 1;

    for (const auto & layer : layers) {
        buf.size_k = std::max(buf.size_k, layer.size_k);
        buf.size_v = std::max(buf.size_v, layer.size_v * layer.n_v);
    }

    return alloc(buf, n_rows);
}

std::shared_ptr<llama_dge_parked> llama_dge_parked::clone() const {
    auto res = std::make_shared<llama_dge_parked>();

    res->n_rows         = n_rows;
    res->n_exact        = n_exact;
    res->n_summed       = n_summed;
    res->exts           = exts;
    res->others         = others;
    res->others_pos_min = others_pos_min;
    res->adapters       = adapters;
    res->mixed          = mixed;

    for (const auto & layer : layers) {
        auto & copy = res->layers.emplace_back();

        copy.size_k = layer.size_k;
        copy.size_v = layer.size_v;
        copy.n_v    = layer.n_v;
        copy.sums   = layer.sums;

        if (!alloc(copy, layer.n_cap)) {
            return nullptr;
        }

        memcpy(copy.k.get(), layer.k.get(), layer.size_k * n_rows);
        for (size_t j = 0; j < layer.n_v; ++j) {
            const size_t offset = j * layer.n_cap * layer.size_v;

            memcpy(copy.v.get() + offset, layer.v.get() + offset, n_rows * layer.size_v);
        }
    }

    return res;
}

int64_t llama_dge_parked::n_bytes_layer(const llama_dge_park_layer & layer) const {
    return (int64_t) (layer.size_k + layer.size_v * layer.n_v) * n_rows + layer.sums.size() * sizeof(float);
}

int64_t llama_dge_parked::n_bytes() const {
    int64_t res = others.size() + exts.size() * sizeof(exts[0]);

    for (const auto & layer : layers) {
        res += n_bytes_layer(layer);
    }

    return res;
}

// what a prompt says is nobody else's business; never writes into a file that is there
static FILE * llama_dge_create_file(const std::string & path) {
#ifdef _WIN32
    return std::fopen(path.c_str(), "wbx");
#else
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    return fd < 0 ? nullptr : fdopen(fd, "wb");
#endif
}

static std::string llama_dge_file_error(const char * what, const std::string & path) {
    return std::string(what) + " " + path + ": " + (errno ? strerror(errno) : "the file ends early");
}

bool llama_dge_parked::file_begin(const std::string & dir, std::string & error) {
    static std::atomic<uint64_t> n_files { 0 };

    const auto pid = (long long) getpid();

    errno = 0;

    // a name that nobody has
    for (int i = 0; i < 100; ++i) {
        const std::string name = dir + "/llama-dge-" + std::to_string(pid) + "-" + std::to_string(n_files++) + ".park";

        out.reset(new file(llama_dge_create_file(name)));
        if (out->fp) {
            path = name;
            return true;
        }
        if (errno != EEXIST) {
            break;
        }
    }

    error = llama_dge_file_error("cannot create a file in", dir);
    out.reset();

    return false;
}

bool llama_dge_parked::file_write(const llama_dge_park_layer & layer, std::string & error) {
    const size_t size_k = layer.size_k * n_rows;
    const size_t size_v = layer.size_v * layer.n_v * n_rows;

    errno = 0;

    if (std::fwrite(layer.k.get(), 1, size_k, out->fp) != size_k ||
            std::fwrite(layer.v.get(), 1, size_v, out->fp) != size_v) {
        error = llama_dge_file_error("cannot write", path);
        return false;
    }

    hashes.push_back(llama_dge_hash_layer(layer, size_k, size_v));

    return true;
}

bool llama_dge_parked::file_end(std::string & error) {
    errno = 0;

    // what the system could not store may be told only now
    const bool ok = std::fflush(out->fp) == 0 && std::ferror(out->fp) == 0;
    if (!ok) {
        error = llama_dge_file_error("cannot write", path);
    }

    out.reset();

    return ok;
}

bool llama_dge_parked::file_read(size_t i, llama_dge_park_layer & buf, std::string & error) const {
    int64_t offset = 0;
    for (size_t j = 0; j < i; ++j) {
        offset += (int64_t) (layers[j].size_k + layers[j].size_v * layers[j].n_v) * n_rows;
    }

    buf.size_k = layers[i].size_k;
    buf.size_v = layers[i].size_v;
    buf.n_v    = layers[i].n_v;

    const size_t size_k = buf.size_k * n_rows;
    const size_t size_v = buf.size_v * buf.n_v * n_rows;

    errno = 0;

    file in(path);

#ifdef _WIN32
    const bool found = in.fp && _fseeki64(in.fp, offset, SEEK_SET) == 0;
#else
    const bool found = in.fp && fseeko(in.fp, offset, SEEK_SET) == 0;
#endif

    if (!found || std::fread(buf.k.get(), 1, size_k, in.fp) != size_k ||
            std::fread(buf.v.get(), 1, size_v, in.fp) != size_v) {
        error = llama_dge_file_error("cannot read", path);
        return false;
    }

    if (llama_dge_hash_layer(buf, size_k, size_v) != hashes[i]) {
        error = path + " is damaged";
        return false;
    }

    return true;
}

bool llama_dge_parked::file_check(llama_dge_park_layer & buf, std::string & error) const {
    for (size_t i = 0; i < layers.size(); ++i) {
        if (!file_read(i, buf, error)) {
            return false;
        }
    }

    return true;
}
