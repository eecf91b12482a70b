"""Questions for documents of the user's own, to which nobody knows the right answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from .prompts import Prompt, Prompter, n_common

#: Asked where no question is given.
QUESTION = "What is this text about?"
_ROOM = 16


def document_prompts(
    documents: Mapping[str, str], questions: Sequence[str], prompter: Prompter, *, max_prompt: int | None = None
) -> Iterator[Prompt]:
    """Yield each question for each document.

    Parameters
    ----------
    documents
        Names and texts.
    questions
        Put after the text.
    prompter
        Of the model.
    max_prompt
        Tokens of a document; of a longer one the middle is left out.
    """
    for name, text in documents.items():
        short = text if max_prompt is None else prompter.cut_middle(text, max_prompt)
        made = [prompter.tokens(f"{short}\n\n{question}") for question in questions]
        shared = max(0, min(n_common(made), min(map(len, made)) - _ROOM)) if len(made) > 1 else 0
        for question, tokens in zip(questions, made):
            mark = hashlib.sha256(question.encode()).hexdigest()[:8]
            yield Prompt(
                task="kld",
                set=name,
                id=f"{name}/{mark}",
                tokens=tuple(tokens),
                info={
                    "question": question,
                    "max_prompt": max_prompt,
                    "style": "chat" if prompter.chat else "completion",
                },
                shared=shared,
            )
