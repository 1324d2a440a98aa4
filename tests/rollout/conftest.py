"""A small tokenizer of the embedded world, one scripted task, and an engine that returns prepared tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer
from envace_jax.config import RolloutConfig
from envace_jax.sampling import Completion
from envace_jax.tasks import Task, parse_task
from envace_jax.tasks.mini.vocabulary import PATTERN, texts

SETTINGS = RolloutConfig(
    group_size=1, thinking=False, max_turns=6, max_length=700, turn_tokens=60, response_tokens=60, engine="hosted"
)
RECORDS = [
    {"order": 111, "item": "lamp", "qty": 2, "price": 3, "status": "new"},
    {"order": 222, "item": "rug", "qty": 1, "price": 5, "status": "paid"},
]


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts(40), 512, directory, pattern=PATTERN)
    return ChatTokenizer.from_pretrained(directory)


def make_task(turns: int = 1, items: Sequence[Sequence[Mapping]] | None = None) -> Task:
    """A task of `turns` user turns; each has one item that holds when the reply says `Done <turn>`, or `items`."""
    reply = [
        [
            {
                "id": f"t{t}",
                "question": "?",
                "focus_on": "assistant.content",
                "pass_condition": "p",
                "weight": 1.0,
                "rule": {"kind": "reply_states", "statements": [f"Done {t}"]},
            }
        ]
        for t in range(turns)
    ]
    messages = [{"role": "system", "content": "Orders."}]
    for t in range(turns):
        messages += [{"role": "user", "content": f"Do {t}."}, {"role": "assistant", "content": f"Done {t}."}]
    record = {"uuid": "scripted", "messages": messages, "tools": [], "checklists": [items or reply]}
    return parse_task(record | {"meta": {"records": RECORDS}})


class Speaker:
    """Spells generations as ids: `<call>` and so on are control ids, the rest is text."""

    def __init__(self, chat: ChatTokenizer):
        self.chat = chat

    def __call__(self, *parts: str) -> np.ndarray:
        ids: list[int] = []
        for part in parts:
            ids += [getattr(self.chat.control, part)] if hasattr(self.chat.control, part) else self._text(part)
        return np.asarray(ids, np.int32)

    def call(self, name: str = "get_order", arguments: str = '{"order": 111}', end: bool = True) -> np.ndarray:
        """One whole call; with `end` the turn ends after it."""
        body = f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
        return self("call_open", body, "call_close", *(["im_end"] if end else []))

    def response(self, text: str) -> np.ndarray:
        return self(text + "\n", "response_close")

    def reply(self, text: str) -> np.ndarray:
        return self(text, "im_end")

    def _text(self, text: str) -> list[int]:
        return self.chat.encode_text(text).tolist()


@pytest.fixture(scope="session")
def say(chat: ChatTokenizer) -> Speaker:
    return Speaker(chat)


class ScriptedEngine:
    """An `Engine` whose i-th started stream draws the generations of `scripts[i]`, in order."""

    def __init__(self, scripts: Sequence[Sequence[np.ndarray]], slots: int = 2, max_length: int = 1000):
        self.slots, self.max_length = slots, max_length
        self._scripts = list(scripts)
        self._rest: dict[int, list[np.ndarray]] = {}
        self.streams: dict[int, list[int]] = {}  # slot → what its cache holds

    def start(self) -> object:
        return object()

    def prefill_groups(self, model, state, prompts, keys):
        for slot, prompt in prompts.items():
            self.streams[slot] = list(prompt)
            if not self._rest.get(slot):  # else the stream is begun anew, within an episode
                self._rest[slot] = list(self._scripts.pop(0))
        return state

    def extend(self, model, state, tokens):
        for slot, new in tokens.items():
            self.streams[slot] += list(new)
        return state

    def decode(self, model, state, active, params, steps=None, enough=None):
        out = {}
        for slot, budget in active.items():
            rest = self._rest[slot]
            now = min(budget, steps or budget, len(rest[0]))
            tokens, rest[0] = rest[0][:now], rest[0][now:]
            stopped = bool(now) and int(tokens[-1]) in params[slot].stop_ids
            if stopped or not len(rest[0]):
                rest.pop(0)
            reason = "stop" if stopped else "length" if now == budget else None
            self.streams[slot] += tokens.tolist()
            out[slot] = Completion(tokens, np.full(now, -0.5, np.float32), np.zeros(now, np.float32), reason)
        return state, out
