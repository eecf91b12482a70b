#include "llama-dge-fault.h"
#include "llama-dge-store.h"

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

// A temporary file, deleted with the host copy (a killed process leaves it behind)

struct llama_dge_store::file {
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

llama_dge_store::llama_dge_store(const llama_dge_kv & kv) : kv(kv), layers(kv.n_layer()) {}

llama_dge_store::~llama_dge_store() {
    out.reset();

    if (!path.empty()) {
        std::remove(path.c_str());
    }
}

// a prompt is private; never writes into a file that is there
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

static uint64_t llama_dge_hash_entries(const llama_dge_entries & data, size_t size_k, size_t size_v) {
    return llama_dge_hash(llama_dge_hash(size_k, data.k, size_k), data.v, size_v);
}

bool llama_dge_store::file_begin(const std::string & dir, std::string & error) {
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

bool llama_dge_store::file_write(size_t i, std::string & error) {
    const size_t size_k = kv.entries_bytes_k(i, n_rows);
    const size_t size_v = kv.entries_bytes_v(i, n_rows);

    const llama_dge_entries data = memory_of(i);

    errno = 0;

    if (std::fwrite(data.k, 1, size_k, out->fp) != size_k || std::fwrite(data.v, 1, size_v, out->fp) != size_v) {
        error = llama_dge_file_error("cannot write", path) + " (" + std::to_string(n_bytes()) + " bytes are needed)";
        return false;
    }

    hashes.push_back(llama_dge_hash_entries(data, size_k, size_v));

    layers[i] = {};

    return true;
}

bool llama_dge_store::file_end(std::string & error) {
    errno = 0;

    // what the system could not store may be reported only now
    const bool ok = std::fflush(out->fp) == 0 && std::ferror(out->fp) == 0;
    if (!ok) {
        error = llama_dge_file_error("cannot write", path) + " (" + std::to_string(n_bytes()) + " bytes are needed)";
    }

    out.reset();

    return ok;
}

bool llama_dge_store::file_reserve() {
    if (llama_dge_alloc_fails()) {
        return false;
    }

    size_t size_k = 0;
    size_t size_v = 0;

    for (size_t i = 0; i < layers.size(); ++i) {
        size_k = std::max(size_k, kv.entries_bytes_k(i, n_rows));
        size_v = std::max(size_v, kv.entries_bytes_v(i, n_rows));
    }

    buffer.k.reset(new (std::nothrow) uint8_t[size_k]);
    buffer.v.reset(new (std::nothrow) uint8_t[size_v]);
    buffer.n_cap = n_rows;

    return buffer.k && buffer.v;
}

bool llama_dge_store::file_read(size_t i, std::string & error) {
    int64_t offset = 0;
    for (size_t j = 0; j < i; ++j) {
        offset += kv.entries_bytes_k(j, n_rows) + kv.entries_bytes_v(j, n_rows);
    }

    const size_t size_k = kv.entries_bytes_k(i, n_rows);
    const size_t size_v = kv.entries_bytes_v(i, n_rows);

    errno = 0;

    file in(path);

#ifdef _WIN32
    const bool found = in.fp && _fseeki64(in.fp, offset, SEEK_SET) == 0;
#else
    const bool found = in.fp && fseeko(in.fp, offset, SEEK_SET) == 0;
#endif

    if (!found || std::fread(buffer.k.get(), 1, size_k, in.fp) != size_k ||
            std::fread(buffer.v.get(), 1, size_v, in.fp) != size_v) {
        error = llama_dge_file_error("cannot read", path);
        return false;
    }

    if (llama_dge_hash_entries(entries(i), size_k, size_v) != hashes[i]) {
        error = path + " is damaged";
        return false;
    }

    return true;
}

bool llama_dge_store::file_check(std::string & error) {
    for (size_t i = 0; i < layers.size(); ++i) {
        if (!file_read(i, error)) {
            return false;
        }
    }

    return true;
}
