"""Several conversations in one context: the answers of one at a time, interleaved, cancelled, refused, failed apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from starlette.testclient import TestClient

from llama_dge import DGEConfig
from llama_dge.cli.estimate import estimate
from llama_dge.server.context import DecodeError, ManyContext
from llama_dge.server.engine import Engine
from llama_dge.server.errors import APIError, Gone
from llama_dge.server.job import Job, Work
from llama_dge.server.prompts import text_prompt
from llama_dge.server.sampling import Sampling
from reference.models import ZOO, make_weights, write_gguf
from reference.serving import (
    BUDGET,
    DGE,
    NEVER_ENDS,
    PROMPT,
    TEMPLATE,
    TEMPLATE_KEY,
    metrics_of,
    serving,
    settings_of,
)

if TYPE_CHECKING:
    from conftest import Zoo

# f32: batches of another size must not tip the scales between two tokens
EXACT = {"type_k": 0, "type_v": 0}
PARALLEL = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "chat.gguf"
    return write_gguf(make_weights(ZOO["g2"]), where, {TEMPLATE_KEY: TEMPLATE})


@pytest.fixture(scope="module")
def one(path: Path) -> Iterator[TestClient]:
    with serving(path, **EXACT) as made:
        yield made


@pytest.fixture(scope="module")
def many(path: Path) -> Iterator[TestClient]:
    with serving(path, parallel=PARALLEL, **EXACT) as made:
        yield made


def ask(client: TestClient, url: str = "/v1/completions", **body: Any) -> Any:
    return client.post(url, json={"max_tokens": 30, "temperature": 0, "logit_bias": NEVER_ENDS, **body})


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"url": "/v1/chat/completions", "messages": messages}


REQUESTS: list[dict[str, Any]] = [
    *({"prompt": PROMPT[3 * i :] + str(i)} for i in range(4)),
    {"prompt": "short"},
    {"prompt": PROMPT + "again", "temperature": 1.5, "seed": 4, "n": 3},
    {"prompt": PROMPT + "whole", "dge": False},
    {"prompt": PROMPT + "smaller", "dge": {"budget": 32}},
    {"prompt": PROMPT + "recall", "dge": "recall"},
    {"prompt": PROMPT + "likely", "logprobs": 2, "stop": ["V"]},
    {"prompt": PROMPT + "grammar", "grammar": "root ::= [a-f]{12}"},
    chat(PROMPT),
    chat(PROMPT, "it jumps", "and then?"),
    {**chat("json"), "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}},
]


def comparable(body: dict[str, Any]) -> Any:
    dge = body["usage"]["dge"]
    choices = [{**choice, "logprobs": None} for choice in body["choices"]]
    return (
        choices,
        body["usage"]["completion_tokens"],
        dge["state"],
        dge.get("budget"),
        dge.get("error"),
    )


def test_answers_are_those_of_one_at_a_time(one: TestClient, many: TestClient) -> None:
    want = [ask(one, **request).json() for request in REQUESTS]
    for _ in range(2):  # the second time on what the sequences hold
        with ThreadPoolExecutor(6) as pool:
            got = [answer.json() for answer in pool.map(lambda request: ask(many, **request), REQUESTS)]
        for request, one_body, body in zip(REQUESTS, want, got):
            assert comparable(body) == comparable(one_body), request
            for a, b in zip(body["choices"], one_body["choices"]):
                if a["logprobs"]:
                    values = (choice["logprobs"]["token_logprobs"] for choice in (a, b))
                    assert next(values) == pytest.approx(next(values), abs=1e-3)
    states = {body["usage"]["dge"]["state"] for body in want}
    assert states == {"evicted", "full", "off"}


def test_a_later_turn_gets_its_own_host_copy_back(many: TestClient) -> None:
    """Conversations that take turns: each is found again in the sequence that holds it."""
    talks = [[PROMPT.replace("fox", name)] for name in ("cat", "dog", "cow")]
    for turn in range(3):
        with ThreadPoolExecutor(3) as pool:
            bodies = [answer.json() for answer in pool.map(lambda talk: ask(many, **chat(*talk)), talks)]
        for talk, body in zip(talks, bodies):
            dge = body["usage"]["dge"]
            assert dge["state"] == "evicted" and dge["rows_kept"] == BUDGET + 1
            if turn:
                assert dge["rows_restored"] > 400 and body["usage"]["prompt_tokens_details"]["cached_tokens"] > 390
            talk += [body["choices"][0]["message"]["content"], "and?"]


def test_more_tokens_than_a_conversation_may_have(many: TestClient) -> None:
    got = ask(many, prompt=PROMPT * 6)
    assert got.status_code == 400 and got.json()["error"]["code"] == "context_length_exceeded"
    body = ask(many, prompt=PROMPT * 5, max_tokens=-1, dge={"budget": 16}).json()
    assert body["usage"]["total_tokens"] == 2048 and body["choices"][0]["finish_reason"] == "length"


def test_memory_of_evicted_conversations(path: Path) -> None:
    """It is that of `llama-dge estimate`: of what is kept, so many times, and not of the contexts."""
    n_prompt = 1200
    cache = {"flash_attn": False, "type_k": 0, "type_v": 0}
    wanted = estimate(path, DGEConfig(**DGE), n_ctx=2048, n_prompt=n_prompt, parallel=PARALLEL, cache=cache)
    with serving(path, parallel=PARALLEL, **EXACT) as client:
        for i in range(PARALLEL):
            ask(client, prompt=str(i) * (n_prompt - 1), max_tokens=5)
        metrics = metrics_of(client.get("/metrics").text)
    assert metrics["llama_dge_evictions_total"] == PARALLEL
    assert metrics["llama_dge_kv_max_bytes"] == wanted.kv_full > 7 * wanted.kv_after
    assert 0.3 * wanted.kv_after < metrics["llama_dge_kv_bytes"] <= wanted.kv_after
    assert metrics["llama_dge_parked_bytes"] == pytest.approx(wanted.parked, rel=0.05)
    assert metrics["llama_dge_compute_bytes"] < 1.5 * wanted.compute_after


@pytest.mark.parametrize(
    "setting", [{"embedding": True}, {"cache": True}, {"logits_all": True}, {"draft_model": "prompt-lookup-decoding"}]
)
def test_settings_that_need_one_conversation_at_a_time(path: Path, setting: dict[str, Any]) -> None:
    with (
        pytest.raises(ValueError, match=f"parallel=2: not with {next(iter(setting))}"),
        serving(path, parallel=2, **setting),
    ):
        pass


# without HTTP: who gets what, and when


def run(path: Path, body: Callable[[Engine], Awaitable[None]], **settings: Any) -> None:
    given = settings_of(path, parallel=PARALLEL, **EXACT, **settings)
    engine = Engine(given, [given])
    try:
        asyncio.run(body(engine))  # type: ignore[arg-type]
    finally:
        engine.close()


def job_of(engine: Engine, prompt: str, n: int = 40, **settings: Any) -> Job:
    sampling = Sampling(temperature=0.0, logit_bias={2: -100.0})
    config = engine.config(None)
    return Job(
        "tiny", config, lambda loaded: Work([text_prompt(loaded.llm, prompt)], sampling, n, **settings), engine.metrics
    )


async def text_of(job: Job, log: list[Job] | None = None) -> str:
    await job.ready()
    text = ""
    async for piece in job.pieces():
        text += piece.text
        if log is not None:
            log.append(job)
    return text


def test_streams_are_interleaved(path: Path) -> None:
    async def body(engine: Engine) -> None:
        jobs = [job_of(engine, PROMPT + str(i)) for i in range(PARALLEL)]
        log: list[Job] = []
        for job in jobs:
            await engine.submit("x", job)
        await asyncio.gather(*(text_of(job, log) for job in jobs))
        for job in jobs:
            first, last = log.index(job), len(log) - 1 - log[::-1].index(job)
            others = {other for other in log[first : last + 1] if other is not job}
            assert others == set(jobs) - {job}

    run(path, body)


def test_a_long_prompt_does_not_stop_the_others(path: Path) -> None:
    """While it is evaluated the others get their tokens: no batch has more of it than its share."""

    async def body(engine: Engine) -> None:
        short = job_of(engine, "short", 60)
        await engine.submit("x", short)
        log: list[Job] = []
        reading = asyncio.ensure_future(text_of(short, log))
        while len(log) < 3:
            await asyncio.sleep(0.001)
        long = job_of(engine, PROMPT * 4, 2)
        start = len(log)
        await engine.submit("x", long)
        await long.ready()
        async for _ in long.pieces():
            break
        assert len(log) - start >= 1600 // 64 / 2  # 64 tokens of 256 a batch
        long.cancel()
        await reading

    run(path, body, n_batch=256)


def test_a_client_that_goes_away_during_its_prompt(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the batch in progress, others do not notice, and its sequence is used again."""
    sizes: list[int] = []
    plain = ManyContext.decode
    leaving: list[Job] = []

    def counted(self: ManyContext, rows: Any) -> None:
        plain(self, rows)
        sizes.append(len(rows))
        if len(rows) > 30 and leaving:
            leaving.pop().cancel()

    monkeypatch.setattr(ManyContext, "decode", counted)

    async def body(engine: Engine) -> None:
        want = await text_of_new(engine, "a")
        sizes.clear()
        goes = job_of(engine, PROMPT.upper())
        leaving.append(goes)
        stays = job_of(engine, PROMPT + "a")
        await engine.submit("x", goes)
        await engine.submit("y", stays)
        with pytest.raises(Gone):
            await text_of(goes)
        assert await text_of(stays) == want
        assert sum(sizes) < 405 + 2 * 128 + 40  # one batch of the other's prompt at most
        assert await text_of_new(engine, "a") == want
        assert engine.status["running"] == 0

    async def text_of_new(engine: Engine, end: str) -> str:
        job = job_of(engine, PROMPT + end)
        await engine.submit("x", job)
        return await text_of(job)

    run(path, body, n_batch=128)


def test_other_settings_wait_for_their_turn_and_nobody_is_passed_over(path: Path) -> None:
    async def body(engine: Engine) -> None:
        base = engine.config(None)
        assert base is not None
        order: list[str] = []

        async def named(name: str, job: Job) -> None:
            await text_of(job)
            order.append(name)

        first = job_of(engine, PROMPT, 60)
        other = job_of(engine, PROMPT + "b", 5)
        other.config = type(base)(budget=32, draft_tokens=2)
        last = job_of(engine, PROMPT + "c", 5)
        for job in (first, other, last):
            await engine.submit("x", job)
        await asyncio.gather(*(named(name, job) for name, job in (("first", first), ("other", other), ("last", last))))
        assert order == ["first", "other", "last"]
        assert (other.usage.dge["budget"], last.usage.dge["budget"]) == (32, BUDGET)

    run(path, body)


def test_a_batch_that_fails_ends_only_who_made_it_grow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ManyContext.decode
    failing: list[int] = []

    def decode(self: ManyContext, rows: Any) -> None:
        plain(self, rows)
        if len(rows) > 30 and failing:
            raise DecodeError(failing.pop())

    monkeypatch.setattr(ManyContext, "decode", decode)

    async def body(engine: Engine) -> None:
        alone = job_of(engine, "short", 80)
        await engine.submit("x", alone)
        want = await text_of(alone)
        again = job_of(engine, "short", 80)
        await engine.submit("x", again)
        log: list[Job] = []
        reading = asyncio.ensure_future(text_of(again, log))
        while len(log) < 3:
            await asyncio.sleep(0.001)
        failing.append(-3)
        big = job_of(engine, PROMPT * 2)
        await engine.submit("x", big)
        with pytest.raises(APIError, match="llama_decode returned -3") as caught:
            await text_of(big)
        assert caught.value.status == 503
        assert await reading == want
        good = job_of(engine, PROMPT)
        await engine.submit("x", good)
        assert len(await text_of(good)) == 40 and good.usage.dge["state"] == "evicted"

    run(path, body, n_batch=128)


def test_the_server_stops_in_the_middle_of_answers(path: Path) -> None:
    async def body(engine: Engine) -> None:
        jobs = [job_of(engine, PROMPT + str(i), 1500) for i in range(PARALLEL + 2)]
        for job in jobs:
            await engine.submit("x", job)
        await asyncio.sleep(0.1)
        engine.stop()
        for job in jobs:
            with pytest.raises(Gone):
                await text_of(job)

    run(path, body)


def test_options(zoo: Zoo) -> None:
    settings = settings_of(zoo["g2"].path, parallel=2)
    assert settings.parallel == 2 and settings.dge_config is not None and settings.dge_config.budget == DGE["budget"]
    with pytest.raises(ValueError, match="parallel"):
        settings_of(zoo["g2"].path, parallel=0)
