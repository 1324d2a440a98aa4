"""A recorded conversation as the token stream that an inline episode would have produced.

Supervised training and teacher-forced measurements need real conversations in the very form the policy samples in:
the same forced context between generations, and each generation with its role.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envace_jax.chat import ChatTokenizer
from envace_jax.rollout.trajectory import ACT, REHEARSE, TokenStream, Trajectory


def encode_conversation(
    chat: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    thinking: bool = True,
    task_id: str = "",
) -> Trajectory:
    """`messages` (optional system, user, then assistant / tool / user ...) as one trajectory of both roles.

    Raises ValueError naming the message when the conversation does not begin with a user turn after the system
    message, or a tool message answers no call.
    """
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise ValueError(f"conversation {task_id!r} has no user message")
    stream = TokenStream()
    stream.context(chat.render(messages[: first + 1], tools, True, thinking))
    results = 0
    for i, message in enumerate(messages[first + 1 :], start=first + 1):
        role = message["role"]
        if role != "tool" and results:
            stream.context(chat.responses_done(thinking))
            results = 0
        if role == "assistant":
            stream.generation(ACT, assistant_tokens(chat, message))
        elif role == "user":
            stream.context(chat.user(message["content"], thinking))
        elif role == "tool":
            if not results and messages[i - 1]["role"] != "assistant":
                raise ValueError(f"conversation {task_id!r}: message {i} is a tool result without a call before it")
            stream.context(chat.response_header(first=not results))
            stream.generation(REHEARSE, response_tokens(chat, message["content"]))
            results += 1
        else:
            raise ValueError(f"conversation {task_id!r}: message {i} has role {role!r} after the first user message")
    return stream.finish(task_id=task_id, messages=tuple(messages))


def assistant_tokens(chat: ChatTokenizer, message: Mapping[str, Any]) -> np.ndarray:
    """An assistant message as the actor would have sampled it, `<|im_end|>` included, thinking left out."""
    control = chat.control
    parts = [chat.encode_text(message.get("content") or "")]
    for i, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        body = f'\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments}}}\n'
        lead = "\n" if i or message.get("content") else ""
        parts += [chat.encode_text(lead), [control.call_open], chat.encode_text(body), [control.call_close]]
    return np.concatenate([*parts, [control.im_end]]).astype(np.int32)


def response_tokens(chat: ChatTokenizer, content: str) -> np.ndarray:
    """A tool result as the rehearser would have sampled it: body, line break, `</tool_response>`."""
    return np.append(chat.encode_text(content + "\n"), chat.control.response_close).astype(np.int32)
