"""Messages as chat templates expect them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from .errors import bad_request
from .request_models import ContentPart, Message, ToolCall


def for_template(messages: Sequence[Message], *, tools: bool, eyes: bool) -> list[dict[str, Any]]:
    """Return messages for a chat template.

    Parameters
    ----------
    messages
        As the client sent them.
    tools
        Whether the template knows calls of tools and their results. One that does not gets them as text.
    eyes
        Whether the model sees images.

    Raises
    ------
    APIError
        A part of a message that the model cannot read.
    """
    names: dict[str, str] = {}  # of the functions that were called, by the id of the call
    result: list[dict[str, Any]] = []
    for message in messages:
        calls = list(message.tool_calls)
        if message.function_call is not None:
            calls.append(ToolCall(function=message.function_call))
        names.update({call.id: call.function.name for call in calls})
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        content = _content(message.content, eyes and role == "user")
        if role == "tool" and not tools:
            role = "user"
        made: dict[str, Any] = {"role": role, "content": content}
        if calls and tools:
            made["tool_calls"] = [_call(call) for call in calls]
        elif calls:
            made["content"] = "\n".join([*([content] if content else []), *(_call_text(call) for call in calls)])
        name = message.name or names.get(message.tool_call_id or "")
        if name:
            made["name"] = name
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        result.append(made)
    return result


def has_images(messages: Sequence[Message]) -> bool:
    """Return whether any message has an image."""
    return any(isinstance(m.content, list) and any(part.type == "image_url" for part in m.content) for m in messages)


def _content(content: str | list[ContentPart] | None, eyes: bool) -> Any:
    if content is None or isinstance(content, str):
        return content or ""  # templates add it to other texts
    parts: list[Any] = []
    for part in content:
        if part.type in ("text", "refusal"):
            parts.append((part.text if part.type == "text" else part.refusal) or "")
        elif part.type == "image_url":
            parts.append({"type": "image_url", "image_url": {"url": _image(part, eyes)}})
        else:
            raise bad_request(
                f"messages: a content part of type {part.type!r} is not served: the model reads text", "messages"
            )
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _image(part: ContentPart, eyes: bool) -> str:
    url = part.image_url if isinstance(part.image_url, str) else part.image_url.url if part.image_url else ""
    if not eyes:
        raise bad_request("messages: this model does not see images; serve one with clip_model_path", "messages")
    if not url.startswith("data:"):
        raise bad_request("messages: an image must be a data: URL; the server fetches nothing", "messages")
    return url


def _call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments or "{}")  # templates write it as JSON again
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _call_text(call: ToolCall) -> str:
    return json.dumps({"name": call.function.name, "arguments": call.function.arguments}, ensure_ascii=False)
