#include "llama-dge-phase.h"

#include "llama-dge.h"

// of each event, by phase: EMPTY FULL ARMED EVICTED SELECTING LOST
struct llama_dge_event_row {
    const char * name;

    llama_dge_transition next[LLAMA_DGE_N_PHASES];
};

static constexpr auto EMPTY     = LLAMA_DGE_PHASE_EMPTY;
static constexpr auto FULL      = LLAMA_DGE_PHASE_FULL;
static constexpr auto ARMED     = LLAMA_DGE_PHASE_ARMED;
static constexpr auto EVICTED   = LLAMA_DGE_PHASE_EVICTED;
static constexpr auto SELECTING = LLAMA_DGE_PHASE_SELECTING;
static constexpr auto LOST      = LLAMA_DGE_PHASE_LOST;

static constexpr llama_dge_transition to(llama_dge_phase phase, llama_dge_reset reset = LLAMA_DGE_RESET_NONE) {
    return { phase, LLAMA_DGE_OK, reset };
}

static constexpr llama_dge_transition no(llama_dge_phase phase, int32_t status) {
    return { phase, status, LLAMA_DGE_RESET_NONE };
}

static constexpr auto PROMPT  = LLAMA_DGE_RESET_PROMPT;
static constexpr auto ENTRIES = LLAMA_DGE_RESET_ENTRIES;
static constexpr auto ALL     = LLAMA_DGE_RESET_ALL;

static constexpr int32_t ERR_SEQ     = LLAMA_DGE_ERR_SEQ;
static constexpr int32_t ERR_EVICTED = LLAMA_DGE_ERR_EVICTED;
static constexpr int32_t ERR_LOST    = LLAMA_DGE_ERR_LOST;

// clang-format off
static const llama_dge_event_row llama_dge_events[LLAMA_DGE_N_EVENTS] = {
    { "append",       { to(FULL),        to(FULL),            to(ARMED),           to(EVICTED),               to(SELECTING),               no(LOST, ERR_LOST) } },
    { "begin",        { to(FULL),        to(FULL),            to(ARMED),           to(EVICTED),               to(SELECTING),               to(FULL, ALL) } },
    { "arm",          { no(EMPTY, ERR_SEQ), to(ARMED, PROMPT), to(ARMED, PROMPT),  no(EVICTED, ERR_EVICTED),  no(SELECTING, ERR_EVICTED),  no(LOST, ERR_SEQ) } },
    { "evict",        { no(EMPTY, ERR_SEQ), no(FULL, ERR_SEQ), to(EVICTED),        no(EVICTED, ERR_EVICTED),  no(SELECTING, ERR_EVICTED),  no(LOST, ERR_LOST) } },
    { "keep_full",    { to(EMPTY),       to(FULL),            to(FULL, PROMPT),    to(EVICTED),               to(SELECTING),               to(LOST) } },
    { "select",       { no(EMPTY, ERR_SEQ), no(FULL, ERR_SEQ), no(ARMED, ERR_SEQ), to(SELECTING),             no(SELECTING, ERR_SEQ),      no(LOST, ERR_LOST) } },
    { "selected",     { to(EMPTY),       to(FULL),            to(ARMED),           to(EVICTED),               to(EVICTED),                 to(LOST) } },
    { "restore",      { no(EMPTY, ERR_SEQ), no(FULL, ERR_SEQ), no(ARMED, ERR_SEQ), to(FULL, PROMPT),          to(FULL, PROMPT),            no(LOST, ERR_LOST) } },
    { "remove_all",   { to(EMPTY, ALL),  to(EMPTY, ALL),      to(EMPTY, ALL),      to(EMPTY, ALL),            to(EMPTY, ALL),              to(EMPTY, ALL) } },
    { "remove_tail",  { to(EMPTY),       to(FULL),            to(ARMED),           to(EVICTED),               to(SELECTING),               to(LOST) } },
    { "remove_part",  { to(EMPTY),       to(FULL),            to(FULL, PROMPT),    no(EVICTED, ERR_EVICTED),  no(SELECTING, ERR_EVICTED),  to(LOST) } },
    { "copy_part",    { to(EMPTY),       to(FULL),            to(ARMED),           no(EVICTED, ERR_EVICTED),  no(SELECTING, ERR_EVICTED),  to(LOST) } },
    { "merge",        { to(FULL, ALL),   to(FULL, ALL),       to(FULL, ALL),       no(EVICTED, ERR_EVICTED),  no(SELECTING, ERR_EVICTED),  to(FULL, ALL) } },
    { "replace",      { to(FULL, ALL),   to(FULL, ALL),       to(FULL, ALL),       to(FULL, ALL),             to(FULL, ALL),               to(FULL, ALL) } },
    { "copy_evicted", { to(EVICTED, ALL), no(FULL, ERR_EVICTED), no(ARMED, ERR_EVICTED), no(EVICTED, ERR_EVICTED), no(SELECTING, ERR_EVICTED), to(EVICTED, ALL) } },
    { "shift",        { to(EMPTY),       to(FULL, ENTRIES),   to(FULL, ENTRIES),   no(EVICTED, ERR_EVICTED),  no(SELECTING, ERR_EVICTED),  to(LOST) } },
    { "load_full",    { to(FULL, ALL),   to(FULL, ALL),       to(FULL, ALL),       to(FULL, ALL),             to(FULL, ALL),               to(FULL, ALL) } },
    { "load_evicted", { to(EVICTED, ALL), to(EVICTED, ALL),   to(EVICTED, ALL),    to(EVICTED, ALL),          to(EVICTED, ALL),            to(EVICTED, ALL) } },
    { "settings",     { to(EMPTY),       to(FULL),            to(FULL, PROMPT),    to(EVICTED),               to(EVICTED),                 to(LOST) } },
    { "lose",         { to(EMPTY),       to(LOST, ALL),       to(LOST, ALL),       to(LOST, ALL),             to(LOST, ALL),               to(LOST) } },
};
// clang-format on

llama_dge_transition llama_dge_next(llama_dge_phase phase, llama_dge_event event) {
    return llama_dge_events[event].next[phase];
}

const char * llama_dge_phase_name(llama_dge_phase phase) {
    static const char * names[LLAMA_DGE_N_PHASES] = { "EMPTY", "FULL", "ARMED", "EVICTED", "SELECTING", "LOST" };

    return names[phase];
}

const char * llama_dge_event_name(llama_dge_event event) {
    return llama_dge_events[event].name;
}
