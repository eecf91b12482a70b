"""The host copy: its limits, its files and when they are deleted, damage, failures and aborts."""

from __future__ import annotations

import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reference import driver, messages
from reference.parked import (
    ANSWER,
    DGE,
    FIRST,
    N_BEFORE,
    N_DRAFT,
    N_PROMPT,
    QUESTION,
    evicted_session,
    full_session,
    parked,
    same_from_now_on,
)
from reference.scenario import decode_each, evict_after, prefill_and_arm, tokens_of

if TYPE_CHECKING:
    from conftest import ContextFactory

PARKS = pytest.mark.parametrize("park", ["ram", "disk"])


# limits and files


@PARKS
def test_limit(new_context: ContextFactory, tmp_path: Path, park: str) -> None:
    """An eviction whose host copy exceeds the limit is refused; the full cache goes on."""
    context = new_context("g2", dge=parked(tmp_path, park))
    evicted_session(context)
    size = context.info()["bytes_parked"]
    # K and V of all rows in f16, and a little for each row
    assert 0 <= size - N_BEFORE * 3 * 2 * 128 * 2 <= 64 * N_BEFORE
    assert context.memory_info()["parked"] == size
    context.clear()
    context.enable(**parked(tmp_path, park, park_limit=size))
    evicted_session(context)
    context.clear()
    context.enable(**parked(tmp_path, park, park_limit=size - 1))
    prefill_and_arm(context, FIRST[:N_PROMPT])
    plain = new_context("g2")
    full_session(plain, N_BEFORE)
    decode_each(context, FIRST[N_PROMPT:N_BEFORE])
    with driver.captured_log() as log:
        assert np.array_equal(decode_each(context, ANSWER), decode_each(plain, ANSWER))
    info = context.info()
    assert (info["state"], info["error"], info["n_rows"]) == (
        driver.STATE_FULL,
        driver.ERR_PARK,
        N_BEFORE + len(ANSWER),
    )
    assert messages.ABOVE_LIMIT in "".join(log)
    assert not list(tmp_path.iterdir())
    # an explicit eviction returns it at once
    context.enable(**parked(tmp_path, park, park_limit=9))
    context.clear()
    context.decode(FIRST[:N_PROMPT])
    assert context.evict() == driver.ERR_PARK
    assert context.restore(5) == 0


def test_limit_is_of_all_sequences(new_context: ContextFactory) -> None:
    context = new_context("g2", n_seq_max=3, dge=DGE)
    evicted_session(context)
    context.enable(**{**DGE, "park_limit": 2 * context.info()["bytes_parked"]})
    evicted_session(context, 1)
    prefill_and_arm(context, FIRST[:N_PROMPT], 2)
    decode_each(context, FIRST[N_PROMPT:], 2)
    assert context.info(2)["error"] == driver.ERR_PARK and context.info(2)["state"] == driver.STATE_FULL
    # what is restored makes room
    assert context.restore(N_BEFORE, 0) == N_BEFORE
    assert context.seq_rm(2, -1, -1)
    evicted_session(context, 2)


def test_files_go(new_context: ContextFactory, tmp_path: Path) -> None:
    """There is a file as long as a sequence could be restored from it, and no longer."""

    def n_files() -> int:
        return len(list(tmp_path.iterdir()))

    context = new_context("g2", n_seq_max=2, dge=parked(tmp_path))
    evicted_session(context)
    assert n_files() == 1
    evicted_session(context, 1)
    assert n_files() == 2
    assert context.seq_rm(1, -1, -1)
    assert n_files() == 1
    context.clear()
    assert n_files() == 0
    assert context.disable() == driver.OK
    context.enable(**parked(tmp_path))
    evicted_session(context)
    # settings without a host copy leave the existing one alone
    context.enable(**{**DGE, "park": "off"})
    assert n_files() == 1 and context.info()["n_parked"] == N_BEFORE
    assert context.restore(N_BEFORE) == N_BEFORE
    assert n_files() == 0
    context.clear()
    context.enable(**parked(tmp_path))
    evicted_session(context)
    state = context.seq_state()
    # a state does not hold the host copy
    assert context.seq_state_load(state) == len(state)
    assert context.info()["state"] == driver.STATE_EVICTED and context.info()["n_parked"] == 0
    assert n_files() == 0 and context.restore(10) == 0
    context.clear()
    evicted_session(context)
    context.seq_cp(0, 1)
    context.seq_keep(1)
    assert n_files() == 1 and context.restore(N_BEFORE, 1) == N_BEFORE and n_files() == 0
    assert context.seq_rm(1, -1, -1)
    evicted_session(context)
    context.close()
    assert n_files() == 0


def test_another_file_is_never_written_to(new_context: ContextFactory, tmp_path: Path) -> None:
    """Files of two contexts lie in one folder, beside those of others."""
    one, two = (new_context("g2", dge=parked(tmp_path)) for _ in range(2))
    evicted_session(one)
    name = next(tmp_path.iterdir()).name
    stem, number, _ = name.rpartition("-")[0], *name.rpartition("-")[2].split(".")
    alien = tmp_path / f"{stem}-{int(number) + 1}.park"
    alien.write_bytes(b"mine")
    evicted_session(two)
    assert len(list(tmp_path.iterdir())) == 3
    assert two.restore(N_BEFORE) == N_BEFORE
    one.clear()
    assert [path.name for path in tmp_path.iterdir()] == [alien.name] and alien.read_bytes() == b"mine"


# errors


def test_nothing_to_restore(new_context: ContextFactory) -> None:
    off = new_context("g2")
    assert off.restore(5) == driver.ERR_DISABLED
    context = new_context("g2", dge=DGE)
    assert context.restore(5) == 0
    assert context.restore(5, seq=-1) == context.restore(5, seq=1) == driver.ERR_SEQ
    prefill_and_arm(context, FIRST[:N_PROMPT])
    assert context.restore(5) == 0 and context.info()["state"] == driver.STATE_ARMED
    decode_each(context, FIRST[N_PROMPT:N_BEFORE])
    # the eviction that is due is not made by a call that has nothing to do
    assert context.restore(5) == 0 and context.info()["state"] == driver.STATE_ARMED
    decode_each(context, FIRST[N_BEFORE:])
    before = context.state()
    assert context.restore(-1) == driver.ERR_PARAMS
    assert context.restore(0) == 0
    assert context.state() == before and context.info()["state"] == driver.STATE_EVICTED
    assert context.restore(5) == 5
    assert context.restore(5) == 0 and context.info()["n_rows"] == 5
    context.clear()
    context.enable(**{**DGE, "park": "off"})
    evict_after(context, FIRST, N_PROMPT, N_DRAFT)
    before = context.state()
    assert context.restore(N_BEFORE) == 0 and context.state() == before


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Files cannot grow above a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [None, 0, 20_000, 150_000])
def test_parking_fails(new_context: ContextFactory, tmp_path: Path, size: int | None) -> None:
    """No folder, or no room in it: the eviction is refused, with the reason in the log, and the full cache goes on."""
    folder = tmp_path / "missing" if size is None else tmp_path
    context = new_context("g2", dge=parked(folder))
    plain = new_context("g2")
    full_session(plain, N_BEFORE)
    prefill_and_arm(context, FIRST[:N_PROMPT])
    decode_each(context, FIRST[N_PROMPT:N_BEFORE])
    with driver.captured_log() as log, small_files(2**30 if size is None else size):
        first = context.decode(ANSWER[:1])
    assert np.array_equal(first, plain.decode(ANSWER[:1]))
    assert np.array_equal(decode_each(context, ANSWER[1:]), decode_each(plain, ANSWER[1:]))
    assert (context.info()["state"], context.info()["error"]) == (driver.STATE_FULL, driver.ERR_PARK)
    assert str(folder) in "".join(log)
    assert not list(tmp_path.iterdir())
    # the same context makes a host copy when it can
    context.clear()
    if size is None:
        folder.mkdir()
    evicted_session(context)
    assert context.restore(N_BEFORE) == N_BEFORE


def flip(at: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return damage


def shorten(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(share * (len(data) - 1))])

    return damage


DAMAGES = {f"flipped {at}": flip(at) for at in (0.0, 0.3, 0.999, 1.0)}
DAMAGES |= {f"shortened {share}": shorten(share) for share in (0.0, 0.5, 1.0)}
DAMAGES |= {"removed": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file(new_context: ContextFactory, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The sequence stays evicted, and the damaged copy is dropped."""
    context, twin = new_context("g2", dge=parked(tmp_path)), new_context("g2", dge=DGE)
    evicted_session(context)
    evicted_session(twin)
    before = context.state()
    damage(next(tmp_path.iterdir()))
    with driver.captured_log() as log:
        assert context.restore(N_BEFORE) == driver.ERR_PARK
    assert str(tmp_path) in "".join(log)
    assert context.state() == before and context.info()["state"] == driver.STATE_EVICTED
    assert np.array_equal(decode_each(context, ANSWER), decode_each(twin, ANSWER))
    assert context.restore(N_BEFORE) == 0 and context.info()["n_parked"] == 0
    assert not list(tmp_path.iterdir())
    context.clear()
    evicted_session(context)
    assert context.restore(N_BEFORE) == N_BEFORE


def test_no_memory_to_restore(new_context: ContextFactory, tmp_path: Path) -> None:
    """Whichever allocation of a restore fails, nothing has changed, and the next try works."""
    # 200 rows make the cache grow
    tokens = tokens_of(300, 8)
    context, twin = (new_context("g2", elastic=True, dge=parked(tmp_path, park)) for park in ("disk", "ram"))
    for each in (context, twin):
        evict_after(each, tokens, 290, N_DRAFT)
        assert each.memory_info()["n_cells"] == 256
    n_failed = 0
    for n in count(1):
        memory, before = context.memory_info(), context.state()
        with driver.failing_alloc(n):
            got = context.restore(292)
        if got == 292:
            break
        assert got == driver.ERR_MEMORY, n
        assert context.state() == before
        after = context.memory_info()
        # layers that could grow may keep the larger buffer, with as many cells as before
        assert memory["kv"] <= after["kv"] <= memory["kv"] * 512 // 256
        assert {**after, "kv": 0, "compute": 0} == {**memory, "kv": 0, "compute": 0}
        assert context.info()["n_parked"] == 292
        n_failed += 1
        token = [FIRST[n]]
        assert np.array_equal(context.decode(token), twin.decode(token))
    assert n_failed >= 3
    assert twin.restore(292) == 292
    same_from_now_on(context, twin, QUESTION, evict=True)


# aborts


@PARKS
def test_abort(new_context: ContextFactory, tmp_path: Path, park: str) -> None:
    """An eviction stopped at any step makes no host copy or all of it. A restore is not stopped."""
    settings: dict[str, Any] = {"dge": parked(tmp_path, park)}
    plain = new_context("g2")
    full_session(plain, N_BEFORE)
    want = plain.decode(QUESTION)
    n_aborted = 0
    for n_calls in count():
        context = new_context("g2", **settings)
        prefill_and_arm(context, FIRST[:N_PROMPT])
        decode_each(context, FIRST[N_PROMPT:N_BEFORE])
        calls = count()
        context.set_abort(lambda calls=calls, n_calls=n_calls: next(calls) >= n_calls)
        context.decode([ANSWER[0]], check=False)
        evicted = context.info()["state"] == driver.STATE_EVICTED
        assert len(list(tmp_path.iterdir())) == (evicted and park == "disk")
        if not evicted:
            n_aborted += 1
            assert context.info()["error"] == driver.ERR_ABORTED and context.info()["n_parked"] == 0
            assert context.restore(5) == 0
            context.set_abort(None)
            decode_each(context, ANSWER[context.pos_max() + 1 - N_BEFORE :])
        assert context.info()["n_parked"] == N_BEFORE
        context.set_abort(lambda: True)
        assert context.restore(N_BEFORE) == N_BEFORE
        # stopped in the first decode after a restore
        context.decode(QUESTION, check=False)
        assert context.rc == 2 and context.seq_rm(0, N_BEFORE, -1)
        context.set_abort(None)
        assert np.array_equal(context.decode(QUESTION), want)
        context.close()
        if evicted:
            break
    assert n_aborted > 3


@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
def test_files_are_the_users_own(new_context: ContextFactory, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        evicted_session(new_context("g2", dge=parked(tmp_path)))
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
