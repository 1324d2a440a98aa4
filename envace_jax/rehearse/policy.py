"""Who plans, who rehearses and who acts: a policy behind one protocol, local or at an endpoint.

Planning and committing are written as generators that yield what they want said, lists of `Ask`, and are sent what was
said, lists of `Spoken`. So one rehearsal, the N plans of one turn, and a benchmark of many tasks are all batched by the
same few lines (`together`, `drive`), and none of them holds a model or an environment. Nobody waits for the longest of
a batch: each goes on as soon as it has been answered.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from envace_jax.chat import ChatTokenizer, Rehearsal, Turn, parse_rehearsal, parse_tool_calls
from envace_jax.errors import EndpointError
from envace_jax.rehearse.streams import Streams, Wanted

Message = Mapping[str, Any]
ACT, REHEARSE = "act", "rehearse"
_PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Ask:
    """One thing to be said next in a conversation.

    who: the name of the policy that is asked. role: ACT for an assistant turn, REHEARSE for the response to the first
    call of the last assistant message that is not answered yet.
    episode, sequence: with the seed they name the random draw.
    """

    who: str
    role: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    temperature: float = 1.0
    top_p: float = 1.0
    episode: int = 0
    sequence: int = 0


@dataclass(frozen=True)
class Spoken:
    """What was said: `turn` by ACT, `response` by REHEARSE; neither where a budget ran out. tokens: sampled for it."""

    turn: Turn | None = None
    response: Rehearsal | None = None
    tokens: int = 0


class Policy(Protocol):
    """Something that can act and rehearse."""

    def speak(self, asks: Sequence[Ask]) -> list[Spoken | None]:
        """What is said to each, in order; None where that takes longer, and the same ask will be put again.

        At least one is said. Raises EndpointError when it cannot be reached.
        """
        ...

    def count(self, text: str) -> int:
        """About how many tokens a text has."""
        ...


T = TypeVar("T")
Speech = Generator[list[Ask], list[Any], T]  # is sent a `Spoken` for each ask


class AnyOf(list[Ask]):
    """Asks of which a speech wants to hear as soon as one is answered, None for the others; it asks them again."""


def say(ask: Ask) -> Speech[Spoken]:
    """One thing said."""
    (spoken,) = yield [ask]
    return spoken


def together(
    speeches: Sequence[Speech[T]],
    at_once: int | None = None,
    progress: Callable[[int, int], None] = lambda ended, of: None,
) -> Speech[list[T]]:
    """Several speeches side by side: what they ask at the same time is asked in one batch.

    at_once: most that have begun and not ended; None: all. A local policy keeps the streams of so many.
    progress: called with the numbers of ended and of all speeches.
    """
    results: list[Any] = [None] * len(speeches)
    asked: dict[int, list[Ask]] = {}
    heard: dict[int, list[Spoken | None]] = {}
    waiting, ended = deque(range(len(speeches))), set()

    def advance(i: int, answers: list[Spoken | None] | None) -> None:
        try:
            asked[i] = speeches[i].send(answers)
            heard[i] = [None] * len(asked[i])
        except StopIteration as stop:
            results[i] = stop.value
            asked.pop(i, None)
            heard.pop(i, None)
            ended.add(i)
            progress(len(ended), len(speeches))

    while True:
        while waiting and (at_once is None or len(asked) < at_once):
            advance(waiting.popleft(), None)
        if not asked:
            return results
        open_ = [(i, k) for i, answers in heard.items() for k, answer in enumerate(answers) if answer is None]
        for (i, k), spoken in zip(open_, (yield AnyOf(asked[i][k] for i, k in open_)), strict=True):
            heard[i][k] = spoken
        for i, answers in list(heard.items()):
            enough = any if isinstance(asked[i], AnyOf) else all
            if enough(answer is not None for answer in answers):
                advance(i, answers)


def drive(speech: Speech[T], policies: Mapping[str, Policy]) -> T:
    """Run a speech to its end: every batch goes to the policies it names."""
    several = together([speech])
    answers: list[Spoken | None] | None = None
    while True:
        try:
            asks = several.send(answers)
        except StopIteration as stop:
            return stop.value[0]
        answers = [None] * len(asks)
        for policy in {id(policies[ask.who]): policies[ask.who] for ask in asks}.values():  # one may have several names
            mine = [i for i, ask in enumerate(asks) if policies[ask.who] is policy]
            for i, spoken in zip(mine, policy.speak([asks[i] for i in mine]), strict=True):
                answers[i] = spoken


def prompt(name: str) -> str:
    """The text of `prompts/NAME.txt`."""
    return (_PROMPTS / f"{name}.txt").read_text(encoding="utf-8").strip()


def unanswered(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The calls of the last assistant message that no tool message answers yet, as `function` objects."""
    at = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if at is None:
        return []
    calls = [call["function"] for call in messages[at].get("tool_calls") or ()]
    return calls[len(messages) - at - 1 :]


class LocalPolicy:
    """A model of this process: both roles in the inline form, one token stream a conversation.

    Args:
        engine: an `envace_jax.sampling.Engine`. model: its `models.qwen3.Qwen3`.
        turn_tokens, response_tokens: most tokens of a turn and of a response.
    """

    def __init__(
        self,
        engine: Any,
        model: Any,
        chat: ChatTokenizer,
        *,
        seed: int = 0,
        turn_tokens: int = 128,
        response_tokens: int = 96,
        thinking: bool = False,
    ):
        self._chat, self._max_length = chat, engine.max_length
        self._streams = Streams(engine, model)
        self._open: dict[int, tuple[Ask, Wanted]] = {}  # by id: asks that are to be put again
        self._seed, self._thinking = seed, thinking
        self._budget = {ACT: turn_tokens, REHEARSE: response_tokens}
        c = chat.control
        self._stops = {
            ACT: (c.im_end, c.endoftext, c.im_start, c.response_open, c.response_close),
            REHEARSE: (c.response_close, c.im_end, c.endoftext, c.im_start, c.call_open, c.call_close, c.response_open),
        }

    def count(self, text: str) -> int:
        return len(self._chat.encode_text(text))

    def speak(self, asks: Sequence[Ask]) -> list[Spoken | None]:
        before = self._open
        self._open = {id(ask): before[id(ask)] if id(ask) in before else (ask, self._wanted(ask)) for ask in asks}
        wanted = [self._open[id(ask)][1] for ask in asks]
        # A stream that is too long already is answered by nothing.
        out = [None if len(want.tokens) < self._max_length else Spoken() for want in wanted]
        fits = [i for i, spoken in enumerate(out) if spoken is None]
        sampled = self._streams.sample([wanted[i] for i in fits]) if fits else []
        for i, tokens in zip(fits, sampled, strict=True):
            if tokens is not None:
                out[i] = self._read(asks[i].role, tokens)
        return out

    def _wanted(self, ask: Ask) -> Wanted:
        from envace_jax.sampling import SamplingParams, sequence_key

        stream = self._stream(ask)
        params = SamplingParams(
            ask.temperature,
            ask.top_p,
            max_new_tokens=max(1, min(self._budget[ask.role], self._max_length - len(stream))),
            stop_ids=self._stops[ask.role],
        )
        name = (ask.episode, ask.sequence)
        return Wanted(name, stream, params, sequence_key(self._seed, 0, *name))

    def _read(self, role: str, tokens: np.ndarray) -> Spoken:
        last = int(tokens[-1]) if len(tokens) else -1
        control = self._chat.control
        if last not in self._stops[role]:  # the budget ran out
            return Spoken(tokens=len(tokens))
        if role == ACT:
            return Spoken(turn=self._chat.parse_turn(tokens), tokens=len(tokens))
        if last != control.response_close:
            return Spoken(tokens=len(tokens))
        return Spoken(response=parse_rehearsal(self._chat.decode(tokens[:-1]), form="inline"), tokens=len(tokens))

    def _stream(self, ask: Ask) -> np.ndarray:
        from envace_jax.rollout import encode_conversation

        chat = self._chat
        parts = [encode_conversation(chat, ask.messages, ask.tools, thinking=self._thinking).tokens]
        if ask.role == REHEARSE:
            parts.append(chat.response_header(first=ask.messages[-1]["role"] == "assistant"))
        elif ask.messages[-1]["role"] == "tool":
            parts.append(chat.responses_done(self._thinking))
        return np.concatenate(parts).astype(np.int32)


class EndpointPolicy:
    """A model behind an OpenAI-compatible endpoint: it acts by its own tool calling, and rehearses by a prompt.

    Raises EndpointError, naming the endpoint, when a request fails for good.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        max_tokens: int = 2000,
        in_flight: int = 16,
        seed: int = 0,
    ):
        from openai import OpenAI

        self._client = OpenAI(base_url=base_url, api_key=api_key or "none", timeout=timeout_s, max_retries=3)
        self._url, self._model, self._max_tokens, self._seed = base_url, model, max_tokens, seed
        self._pool = ThreadPoolExecutor(in_flight, thread_name_prefix="policy")

    def count(self, text: str) -> int:
        return -(-len(text) // 3)  # the tokenizer is not here: a cautious guess

    def speak(self, asks: Sequence[Ask]) -> list[Spoken]:
        return list(self._pool.map(self._speak, asks))

    def _speak(self, ask: Ask) -> Spoken:
        messages, more = list(ask.messages), {"tools": list(ask.tools)} if ask.tools else {}
        if ask.role == REHEARSE:
            messages, more = rehearsal_request(ask), {}
        else:
            messages = _with_call_ids(messages)
        try:
            reply = self._client.chat.completions.create(
                model=self._model,
                messages=messages,
                temperature=ask.temperature,
                top_p=ask.top_p,
                max_tokens=self._max_tokens,
                seed=self._seed * 1_000_003 + ask.episode * 1009 + ask.sequence,
                **more,
            )
            message = reply.choices[0].message
        except Exception as error:  # the client, the network and the server fail in many ways
            said = " ".join(str(error).split())[:300] or type(error).__name__
            raise EndpointError(f"{self._url}, model {self._model}: {said}") from error
        tokens = reply.usage.completion_tokens if reply.usage else 0
        text = message.content or ""
        if ask.role == REHEARSE:
            return Spoken(response=parse_rehearsal(text, form="simulator"), tokens=tokens)
        for call in message.tool_calls or ():
            function = {"name": call.function.name, "arguments": call.function.arguments}
            text += f"\n<tool_call>\n{json.dumps(function)}\n</tool_call>"
        return Spoken(turn=parse_tool_calls(text), tokens=tokens)


def rehearsal_request(ask: Ask) -> list[dict[str, str]]:
    """The request that makes a model behind an endpoint rehearse one call."""
    history = [m for m in ask.messages if m["role"] != "system"]
    call = unanswered(ask.messages)[0]
    system = "\n".join(m["content"] for m in ask.messages if m["role"] == "system")
    parts = {
        "Tools": json.dumps(list(ask.tools), ensure_ascii=False),
        "What the assistant was told": system,
        "Conversation": json.dumps(history, ensure_ascii=False),
        "Call": json.dumps(dict(call), ensure_ascii=False),
    }
    user = "\n\n".join(f"# {title}\n{text}" for title, text in parts.items() if text)
    return [{"role": "system", "content": prompt("simulator")}, {"role": "user", "content": user}]


def _with_call_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Endpoints tie results to calls by id; ours are tied by order."""
    out, waiting = [], []
    for number, message in enumerate(messages):
        message = dict(message)
        if message.get("tool_calls"):
            calls = [{**call, "id": f"call_{number}_{i}"} for i, call in enumerate(message["tool_calls"])]
            message["tool_calls"], waiting = calls, [call["id"] for call in calls]
        elif message["role"] == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)
        out.append(message)
    return out


def with_note(messages: Sequence[Message], note: str) -> list[Message]:
    """The conversation with a note below its last user message; without a note, as it is."""
    if not note:
        return list(messages)
    at = max(i for i, m in enumerate(messages) if m["role"] == "user")
    noted = {**messages[at], "content": f"{messages[at]['content']}\n\n{note}"}
    return [*messages[:at], noted, *messages[at + 1 :]]


__all__ = [
    "ACT",
    "REHEARSE",
    "Ask",
    "EndpointPolicy",
    "LocalPolicy",
    "Policy",
    "Speech",
    "Spoken",
    "drive",
    "prompt",
    "rehearsal_request",
    "say",
    "together",
    "unanswered",
    "with_note",
]
