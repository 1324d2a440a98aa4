"""What the mini policy's tokenizer is trained on, and how it splits.

JSON keys and short quoted words are one piece each, so that a record costs few tokens; ids are single digits, so that
an id never seen in training is made of tokens that were.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from envace_jax.tasks.mini.demos import demonstrations, drills, readings
from envace_jax.tasks.mini.shop import TOOLS

VOCAB_SIZE = 896
PATTERN = r',? ?[\[{]*"[a-z_]+":| ?\[?"[a-z_ ]+"| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}"]+"?| ?"[}\]]*|\s+'
# What the chat template writes around every conversation.
_FRAME = 'system\nuser\nassistant\n\n\n# Tools\n<tools>\n</tools>\nCall: {"name": ..., "arguments": {...}}\n'


def texts(conversations: int = 1500) -> Iterator[str]:
    """Texts of demonstrations and drills, as the policy reads and writes them."""
    yield from [_FRAME, *(json.dumps(tool) + "\n" for tool in TOOLS)] * conversations
    for messages in itertools.islice(demonstrations(-1), conversations):
        yield from map(text, messages)
    for messages in itertools.islice(drills(-1), conversations // 2):
        yield from map(text, messages)
    for messages in itertools.islice(readings(-1), conversations // 10):
        yield from map(text, messages)


def text(message: dict[str, Any]) -> str:
    """A message as it stands in a prompt, its frame left out."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [f'\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n' for call in calls]
    return message["content"] + "".join(written) + ("\n" if message["role"] == "tool" else "")
