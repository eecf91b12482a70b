"""``llama-dge chat``: a conversation about a document."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..config import DGEConfig
from ..llama import Llama
from ._common import (
    CLIError,
    Progress,
    load,
    load_vocabulary,
    mebibytes,
    model_path,
    read_text,
    tokenize,
    trained_context,
    why_full,
)
from ._conversation import ChatLlama, Conversation
from ._options import (
    add_answer_options,
    add_cache_options,
    add_context,
    add_dge_options,
    add_full,
    add_model,
    add_threads,
    add_verbose,
    context_settings,
    context_size,
    temperature,
    wanted_dge,
)

_ROOM = 4096  # tokens that questions and answers get beside the document

_HELP = """\
/stats            entries, bytes and seconds of the last answer
/regenerate [T]   the last answer once more, at temperature T
/undo             forget the last question and its answer
/reset            forget all of them, but not the document
/help             this list
/quit             end, as Ctrl-D does; Ctrl-C ends an answer
Other lines are questions. A space in front of / makes a question of a command."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "chat",
        help="a conversation about a document",
        description="Reads questions, one a line, from the terminal or stdin and answers on stdout. /help lists what "
        "else can be typed.",
    )
    add_model(parser)
    parser.add_argument("-f", "--file", metavar="FILE", help="document, UTF-8; - reads stdin")
    parser.add_argument(
        "-p", "--prompt", metavar="QUESTION", action="append", help="question or command; repeat it for more, then exit"
    )
    add_answer_options(parser)
    add_context(parser, f"the document and {_ROOM}, if trained for as much")
    add_cache_options(parser)
    add_threads(parser)
    add_full(parser)
    add_dge_options(parser, DGEConfig())
    add_verbose(parser)
    parser.set_defaults(command_function=_chat)


def _chat(args: argparse.Namespace) -> int:
    config = wanted_dge(args, DGEConfig())
    if args.file == "-" and not args.prompt:
        raise CLIError("the document comes from stdin, so ask with -p")
    document = None if args.file is None else read_text(args.file)
    progress = Progress(args.verbose)
    path = model_path(args.model, progress)
    vocabulary = load_vocabulary(path)
    n_document = len(tokenize(vocabulary, document or ""))
    n_trained = trained_context(vocabulary) or _ROOM
    n_ctx = context_size(args.n_ctx, min(-(-(n_document + _ROOM) // 256) * 256, n_trained), vocabulary)
    if n_document >= n_ctx:
        raise CLIError(f"the document has {n_document} tokens and does not fit into --n-ctx {n_ctx}")
    if "tokenizer.chat_template" not in vocabulary.metadata():
        print("llama-dge chat: the model has no chat template, so Llama 2's is used", file=sys.stderr)
    if n_ctx > n_trained:
        print(f"llama-dge chat: the model was trained for {n_trained} tokens, not {n_ctx}", file=sys.stderr)

    llm = load(path, progress, make=ChatLlama, dge=config, n_ctx=n_ctx, **context_settings(args))
    assert isinstance(llm, ChatLlama)
    llm.progress = progress
    conversation = Conversation(llm, document, max_tokens=args.max_tokens, temp=args.temp, seed=args.seed)
    for line in args.prompt if args.prompt else _lines():
        try:
            if not _do(llm, conversation, line):
                break
        except CLIError as error:
            if args.prompt:
                raise
            print(f"llama-dge chat: {error}", file=sys.stderr, flush=True)
    llm.close()
    return 0


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() has a history then
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _do(llm: ChatLlama, conversation: Conversation, line: str) -> bool:
    """Answer a question or obey a command. Returns whether to go on."""
    if not line.strip():
        return True
    if not line.startswith("/"):
        _show_end(conversation.ask(line.strip(), _write))
        return True
    command, *rest = line.split()
    if len(rest) > (command == "/regenerate"):
        raise CLIError(f"{command} takes no {rest[-1]}")
    if command == "/quit":
        return False
    if command == "/help":
        print(_HELP, flush=True)
    elif command == "/stats":
        for name, value in _stats(llm):
            print(f"{name:<18}{value}", flush=True)
    elif command == "/reset":
        conversation.reset()
    elif command == "/undo":
        conversation.undo()
    elif command == "/regenerate":
        try:
            temp = temperature(rest[0]) if rest else None
        except (ValueError, argparse.ArgumentTypeError):
            raise CLIError(f"{rest[0]} is not a temperature in 0 .. 100") from None
        _show_end(conversation.regenerate(_write, temp))
    else:
        raise CLIError(f"no command {command}; /help lists them")
    return True


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_end(why: str | None) -> None:
    _write("\n")
    if why is not None:
        print(f"[{why}]", file=sys.stderr, flush=True)


def _speed(n: int, seconds: float) -> str:
    return f"{seconds:.2f} s, {n:,} tokens" + (f", {n / seconds:,.1f} tokens/s" if seconds > 0 else "")


def _stats(llm: ChatLlama) -> Iterator[tuple[str, str]]:
    """Describe the last answer and the memory that is in use."""
    turn, stats, memory = llm.turn, llm.dge_stats, llm.dge_memory
    restored = stats.seconds_restore if stats is not None and stats.rows_restored > 0 else 0.0
    eviction = stats.seconds if stats is not None else 0.0

    yield "prompt", f"{turn.n_prompt:,} tokens, {turn.n_evaluated:,} of them evaluated"
    if stats is not None and stats.state == "evicted":
        yield "entries kept", f"{stats.rows_after:,} of {stats.rows_before:,} per KV head in {stats.n_layer} layers"
    else:
        yield "entries kept", f"all {llm.n_tokens:,}: {_why_full(llm)}"
    if stats is not None:
        yield "entries parked", f"{stats.rows_parked:,}"
        yield "entries restored", f"{stats.rows_restored:,}"
    yield "KV cache", f"{mebibytes(memory.kv)} of {mebibytes(memory.kv_max)} at --n-ctx {llm.n_ctx()}"
    where = f" ({llm.dge_config.parks})" if llm.dge_config is not None else ""
    yield "host copy", f"{mebibytes(memory.parked)}{where}"
    if memory.other:
        yield "other caches", mebibytes(memory.other)
    yield "compute buffers", mebibytes(memory.compute)
    yield "eviction buffers", mebibytes(memory.dge)
    yield "weights", mebibytes(memory.weights)
    yield "prefill", _speed(turn.n_evaluated, max(turn.seconds_prompt - restored, 0.0))
    yield "restore", f"{restored:.4f} s"
    yield "eviction", f"{eviction:.4f} s"
    yield "answer", _speed(max(turn.n_tokens - 1, 0), max(turn.seconds_answer - eviction, 0.0))


def _why_full(llm: Llama) -> str:
    return "nothing was asked yet" if llm.n_tokens == 0 else why_full(llm.dge_stats)
