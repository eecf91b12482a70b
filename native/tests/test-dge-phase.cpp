// The life of a sequence: every cell of the table in docs/architecture.md, refusals included, on a sequence whose fields are
// all set.

#include "llama-dge-seq.h"
#include "llama-dge.h"

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

// the sequence holds a pointer to one
class llama_dge_store {};

static int n_failed = 0;

#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: failed: %s: ", __FILE__, __LINE__, #cond);                                         \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            n_failed++;                                                                                                \
        }                                                                                                              \
    } while (0)

// cells of the rows of a markdown table, trimmed and without backticks
static std::vector<std::vector<std::string>> read_table(const std::string & path, const std::string & first) {
    std::ifstream in(path);

    std::vector<std::vector<std::string>> res;

    for (std::string line; std::getline(in, line);) {
        const bool is_row = !line.empty() && line[0] == '|';

        if (!is_row || (res.empty() && line.find("| " + first + " |") != 0)) {
            if (!res.empty()) {
                break;
            }
            continue;
        }

        std::vector<std::string> cells;
        std::stringstream        stream(line.substr(1));

        for (std::string cell; std::getline(stream, cell, '|');) {
            std::string text;
            for (const char c : cell) {
                if (c != ' ' && c != '`') {
                    text += c;
                }
            }
            cells.push_back(text);
        }
        res.push_back(cells);
    }

    return res;
}

static const std::map<std::string, int32_t> statuses = {
    { "ERR_SEQ", LLAMA_DGE_ERR_SEQ },
    { "ERR_EVICTED", LLAMA_DGE_ERR_EVICTED },
    { "ERR_LOST", LLAMA_DGE_ERR_LOST },
};

static const std::map<std::string, llama_dge_reset> resets = {
    { "", LLAMA_DGE_RESET_NONE },
    { "prompt", LLAMA_DGE_RESET_PROMPT },
    { "entries", LLAMA_DGE_RESET_ENTRIES },
    { "all", LLAMA_DGE_RESET_ALL },
};

static llama_dge_phase phase_of(const std::string & name) {
    for (int p = 0; p < LLAMA_DGE_N_PHASES; ++p) {
        if (name == llama_dge_phase_name((llama_dge_phase) p)) {
            return (llama_dge_phase) p;
        }
    }

    return LLAMA_DGE_N_PHASES;
}

// by the shortest way from a new sequence
static llama_dge_seq make_seq(llama_dge_phase phase) {
    static const std::map<llama_dge_phase, std::vector<llama_dge_event>> ways = {
        { LLAMA_DGE_PHASE_EMPTY, {} },
        { LLAMA_DGE_PHASE_FULL, { LLAMA_DGE_EVENT_APPEND } },
        { LLAMA_DGE_PHASE_ARMED, { LLAMA_DGE_EVENT_APPEND, LLAMA_DGE_EVENT_ARM } },
        { LLAMA_DGE_PHASE_EVICTED, { LLAMA_DGE_EVENT_APPEND, LLAMA_DGE_EVENT_ARM, LLAMA_DGE_EVENT_EVICT } },
        { LLAMA_DGE_PHASE_SELECTING,
                { LLAMA_DGE_EVENT_APPEND, LLAMA_DGE_EVENT_ARM, LLAMA_DGE_EVENT_EVICT, LLAMA_DGE_EVENT_SELECT } },
        { LLAMA_DGE_PHASE_LOST, { LLAMA_DGE_EVENT_APPEND, LLAMA_DGE_EVENT_LOSE } },
    };

    llama_dge_seq seq;

    for (const auto event : ways.at(phase)) {
        CHECK(seq.on(event).status == LLAMA_DGE_OK, "%s", llama_dge_event_name(event));
    }
    CHECK(seq.phase() == phase, "%s", llama_dge_phase_name(phase));

    seq.n_prompt            = 100;
    seq.kept                = { { { 1, 2 } } };
    seq.pos_min             = 90;
    seq.store               = std::make_shared<llama_dge_store>();
    seq.stats.n_recalls     = 3;
    seq.origin.known        = true;
    seq.restored.n_restored = 7;

    return seq;
}

static bool has_prompt(const llama_dge_seq & seq) {
    return seq.n_prompt == 100 && !seq.kept.empty() && seq.pos_min == 90 && seq.store && seq.stats.n_recalls == 3;
}

static bool has_no_prompt(const llama_dge_seq & seq) {
    return seq.n_prompt == 0 && seq.kept.empty() && seq.pos_min == -1 && !seq.store && seq.stats.n_recalls == 0;
}

static void check_cell(llama_dge_phase phase, llama_dge_event event, const std::string & cell) {
    const std::string where = std::string(llama_dge_phase_name(phase)) + ", " + llama_dge_event_name(event);

    auto seq = make_seq(phase);

    const auto res = seq.on(event);

    // a refusal changes nothing
    if (statuses.count(cell) > 0) {
        CHECK(res.status == statuses.at(cell), "%s: status %d", where.c_str(), res.status);
        CHECK(make_seq(phase).allows(event) == res.status, "%s", where.c_str());
        CHECK(seq.phase() == phase && has_prompt(seq) && seq.restored.n_restored == 7, "%s", where.c_str());
        return;
    }

    const size_t      comma = cell.find(',');
    const std::string reset = comma == std::string::npos ? "" : cell.substr(comma + 1);

    CHECK(resets.count(reset) == 1, "%s: '%s'", where.c_str(), cell.c_str());
    CHECK(res.status == LLAMA_DGE_OK, "%s: status %d", where.c_str(), res.status);
    CHECK(seq.phase() == phase_of(cell.substr(0, comma)), "%s: %s", where.c_str(), llama_dge_phase_name(seq.phase()));
    CHECK(resets.count(reset) == 0 || res.reset == resets.at(reset), "%s: reset %d", where.c_str(), res.reset);

    const bool keeps_origin = res.reset != LLAMA_DGE_RESET_ALL;

    CHECK(res.reset == LLAMA_DGE_RESET_NONE ? has_prompt(seq) : has_no_prompt(seq), "%s", where.c_str());
    CHECK(seq.origin.known == keeps_origin, "%s", where.c_str());
    CHECK((seq.restored.n_restored == 7) == keeps_origin, "%s", where.c_str());
}

// no event leads from a sequence without entries to one that is evicted, and none revives a lost one but those that begin anew
static void check_rules() {
    for (int e = 0; e < LLAMA_DGE_N_EVENTS; ++e) {
        const auto event = (llama_dge_event) e;

        const auto from_empty = llama_dge_next(LLAMA_DGE_PHASE_EMPTY, event);
        const bool brings     = event == LLAMA_DGE_EVENT_COPY_EVICTED || event == LLAMA_DGE_EVENT_LOAD_EVICTED;

        CHECK(brings || from_empty.phase == LLAMA_DGE_PHASE_EMPTY || from_empty.phase == LLAMA_DGE_PHASE_FULL, "%s",
                llama_dge_event_name(event));

        // what is known of the prompt is forgotten with the evicted entries, and only then
        for (const auto phase : { LLAMA_DGE_PHASE_EVICTED, LLAMA_DGE_PHASE_SELECTING }) {
            const auto next  = llama_dge_next(phase, event);
            const bool stays = next.phase == LLAMA_DGE_PHASE_EVICTED || next.phase == LLAMA_DGE_PHASE_SELECTING;

            CHECK(stays ? next.reset == LLAMA_DGE_RESET_NONE || brings : next.reset != LLAMA_DGE_RESET_NONE, "%s, %s",
                    llama_dge_phase_name(phase), llama_dge_event_name(event));
        }

        const auto from_lost = llama_dge_next(LLAMA_DGE_PHASE_LOST, event);

        CHECK(from_lost.phase == LLAMA_DGE_PHASE_LOST || from_lost.reset == LLAMA_DGE_RESET_ALL, "%s",
                llama_dge_event_name(event));
    }
}

// a copy of an evicted sequence has its kept set and shares its host copy
static void check_copy() {
    const auto src = make_seq(LLAMA_DGE_PHASE_SELECTING);

    llama_dge_seq dst;
    dst.copy(src);

    CHECK(dst.phase() == LLAMA_DGE_PHASE_EVICTED && has_prompt(dst) && dst.store == src.store, "copy");
}

int main() {
    const auto table = read_table(LLAMA_DGE_PHASE_TABLE, "event");

    CHECK(table.size() == 2 + LLAMA_DGE_N_EVENTS, "%s has %zu rows", LLAMA_DGE_PHASE_TABLE, table.size());

    for (int e = 0; e < LLAMA_DGE_N_EVENTS && 2 + e < (int) table.size(); ++e) {
        const auto & row = table[2 + e];

        CHECK(row[0] == llama_dge_event_name((llama_dge_event) e), "'%s' instead of '%s'", row[0].c_str(),
                llama_dge_event_name((llama_dge_event) e));
        CHECK(row.size() >= 1 + LLAMA_DGE_N_PHASES, "%s", row[0].c_str());

        for (int p = 0; p < LLAMA_DGE_N_PHASES && 1 + p < (int) row.size(); ++p) {
            CHECK(table[0][1 + p] == llama_dge_phase_name((llama_dge_phase) p), "%s", table[0][1 + p].c_str());
            check_cell((llama_dge_phase) p, (llama_dge_event) e, row[1 + p]);
        }
    }

    check_rules();
    check_copy();

    if (n_failed > 0) {
        fprintf(stderr, "%d checks failed\n", n_failed);
        return 1;
    }

    printf("OK\n");
    return 0;
}
