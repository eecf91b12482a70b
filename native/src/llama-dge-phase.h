#pragma once

#include <cstdint>

// The life of a sequence: one phase, and one table that says what each event makes of it. The table of
// docs/architecture.md is checked against this one.

enum llama_dge_phase {
    LLAMA_DGE_PHASE_EMPTY,
    LLAMA_DGE_PHASE_FULL,  // holds entries, nothing was evicted
    LLAMA_DGE_PHASE_ARMED, // an eviction will follow
    LLAMA_DGE_PHASE_EVICTED,
    LLAMA_DGE_PHASE_SELECTING, // evicted, and a thread selects again
    LLAMA_DGE_PHASE_LOST,      // emptied because a device failed
    LLAMA_DGE_N_PHASES,
};

enum llama_dge_event {
    LLAMA_DGE_EVENT_APPEND,       // a batch adds tokens behind what is there
    LLAMA_DGE_EVENT_BEGIN,        // a batch adds tokens from position 0 on
    LLAMA_DGE_EVENT_ARM,          // the prompt is complete
    LLAMA_DGE_EVENT_EVICT,        // the eviction is done
    LLAMA_DGE_EVENT_KEEP_FULL,    // no eviction follows: not wanted, not needed, or failed before an entry moved
    LLAMA_DGE_EVENT_SELECT,       // a thread starts to select
    LLAMA_DGE_EVENT_SELECTED,     // it has ended, or its result is not wanted
    LLAMA_DGE_EVENT_RESTORE,      // the host copy is back
    LLAMA_DGE_EVENT_REMOVE_ALL,   // all entries are removed
    LLAMA_DGE_EVENT_REMOVE_TAIL,  // entries behind the prompt, or behind the last selection, are removed
    LLAMA_DGE_EVENT_REMOVE_PART,  // others are removed
    LLAMA_DGE_EVENT_COPY_PART,    // a part is copied into another sequence
    LLAMA_DGE_EVENT_MERGE,        // entries of a full sequence of the same stream are copied into it
    LLAMA_DGE_EVENT_REPLACE,      // it becomes a copy of a full sequence
    LLAMA_DGE_EVENT_COPY_EVICTED, // it becomes a copy of an evicted sequence
    LLAMA_DGE_EVENT_SHIFT,        // positions are added to or divided
    LLAMA_DGE_EVENT_LOAD_FULL,    // a state without an eviction was loaded
    LLAMA_DGE_EVENT_LOAD_EVICTED, // a state with one was loaded
    LLAMA_DGE_EVENT_SETTINGS,     // other settings are in force
    LLAMA_DGE_EVENT_LOSE,         // a device failed while its entries moved
    LLAMA_DGE_N_EVENTS,
};

// what is forgotten on the way
enum llama_dge_reset {
    LLAMA_DGE_RESET_NONE,
    LLAMA_DGE_RESET_PROMPT,  // the armed prompt, the eviction, the kept set, the host copy
    LLAMA_DGE_RESET_ENTRIES, // and what was captured of the entries: queries, sums
    LLAMA_DGE_RESET_ALL,     // and which adapters made them, the last restore: the sequence is empty
};

struct llama_dge_transition {
    llama_dge_phase phase;  // of afterwards; where refused, the same
    int32_t         status; // OK, or why the event is refused
    llama_dge_reset reset;
};

llama_dge_transition llama_dge_next(llama_dge_phase phase, llama_dge_event event);

const char * llama_dge_phase_name(llama_dge_phase phase);
const char * llama_dge_event_name(llama_dge_event event);
