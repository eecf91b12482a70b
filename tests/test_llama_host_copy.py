"""llama_dge.Llama and the host copy: what a later prompt finds when settings, or the draft, changed in between."""

from __future__ import annotations

from pathlib import Path

from reference.instances import Instances, greedy
from reference.scenario import tokens_of

TOKENS = tokens_of(400, 0)


def test_recall_is_switched_on_for_a_host_copy_in_a_file(new_llm: Instances, tmp_path: Path) -> None:
    """A copy on disk is not recalled from: the kept set stays, and the next prompt recalls from RAM."""
    disk = {"budget": 64, "draft_tokens": 2, "park": "disk", "park_dir": str(tmp_path)}
    recall = {"budget": 64, "draft_tokens": 2, "recall": 4}
    llm = new_llm(disk)
    first = greedy(llm, TOKENS[:150], 16)
    assert len(list(tmp_path.iterdir())) == 1
    llm.set_dge(recall)
    assert llm.dge_stats.state == "evicted" and llm.dge_stats.n_recalls == 0 and llm.dge_stats.error is None
    llm.eval([TOKENS[200]] * 9)
    assert llm.dge_stats.n_recalls == 0
    prompt = [*TOKENS[:150], *first, *TOKENS[160:170]]
    assert greedy(llm, prompt, 20) == greedy(new_llm(recall), prompt, 20)
    assert llm.dge_stats.n_recalls > 0 and not list(tmp_path.iterdir())


def test_a_caller_that_moves_back_into_the_draft(new_llm: Instances) -> None:
    dge = {"budget": 64, "draft_tokens": 8}
    llm = new_llm(dge)
    greedy(llm, TOKENS[:150], 17)
    llm.n_tokens = 151
    own = tokens_of(30, 5)
    llm.eval(own)
    prompt = [*llm.input_ids[:151].tolist(), *own, *tokens_of(20, 6)]
    assert greedy(llm, prompt, 24) == greedy(new_llm(dge), prompt, 24)
