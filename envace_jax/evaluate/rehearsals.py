"""Teacher-forced fidelity: given the real history, does the rehearsal role answer as the real world did?

Every recorded result of a conversation is one case. One forward pass over a conversation scores all its cases: the
log-probability of the real response, and whether greedy decoding would have spelled it token by token. Only where it
would not is the response decoded, from the first token on which they differ, since other tokens may be the same JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from envace_jax.chat import ChatTokenizer, parse_rehearsal
from envace_jax.evaluate.metrics import read_response
from envace_jax.rollout import REHEARSE, Trajectory, encode_conversation
from envace_jax.sampling import Engine, Grammar, SamplingParams
from models.qwen3 import Qwen3

ROWS, TOKENS = 32, 2**15  # in one forward pass: most conversations, and most tokens where it is more than one
BUCKET = 128  # lengths are padded to multiples of it; positions whose logits are held at a time


@dataclass(frozen=True)
class Case:
    """One recorded call: tokens[start:stop] of its conversation are the real response, its closing tag included.

    tool: the name called. after_write: an earlier call of the conversation changed the world. refused: the result is
    an error.
    """

    conversation: int
    tool: str
    start: int
    stop: int
    real: Any
    after_write: bool
    refused: bool


@dataclass(frozen=True)
class Outcome:
    """nll: of the whole real response, in nats over `tokens` tokens. exact: greedy decoding gives equal JSON."""

    case: Case
    nll: float
    tokens: int
    exact: bool
    predicted: str


def recorded_cases(
    conversation: int, messages: Sequence[Mapping[str, Any]], trajectory: Trajectory, writes
) -> list[Case]:
    """The cases of one conversation and its encoding; `writes`: names of the tools that change the world."""
    starts = [
        np.flatnonzero(trajectory.generations == g)
        for g, role in trajectory.generation_roles().items()
        if role == REHEARSE
    ]
    cases, pending, wrote = [], [], False
    results = iter(starts)
    for message in messages:
        if message["role"] == "assistant":
            pending = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        elif message["role"] == "tool":
            at, name, real = next(results), pending.pop(0), read_response(message["content"])
            refused = isinstance(real, dict) and bool({"error", "error_tool_call"} & real.keys())
            cases.append(Case(conversation, name, int(at[0]), int(at[-1]) + 1, real, wrote, refused))
            wrote = wrote or (name in writes and not refused)
    return cases


def rehearse_recorded(
    engine: Engine,
    model: Qwen3,
    chat: ChatTokenizer,
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]],
    grammar: Grammar,
    *,
    writes: Iterable[str] = (),
    thinking: bool = False,
) -> list[Outcome]:
    """The outcome of every recorded call of `conversations`, (messages, tools) each, in order.

    Conversations that do not fit the engine's slots are cut there: later calls are left out.
    """
    encoded = [encode_conversation(chat, messages, tools, thinking=thinking) for messages, tools in conversations]
    writes = frozenset(writes)
    cases = [
        case
        for i, ((messages, _), trajectory) in enumerate(zip(conversations, encoded, strict=True))
        for case in recorded_cases(i, messages, trajectory, writes)
        if case.stop <= engine.max_length
    ]
    scored = _score(model, [t.tokens[: engine.max_length] for t in encoded], chat.vocab_size)
    logps, agrees = zip(*scored, strict=True) if scored else ((), ())
    wrong: dict[int, int] = {}  # case → where greedy decoding leaves the real response
    for k, case in enumerate(cases):
        differs = np.flatnonzero(~agrees[case.conversation][case.start : case.stop])
        if len(differs):
            wrong[k] = case.start + int(differs[0])
    decoded = _decode(engine, model, grammar, encoded, cases, wrong)
    outcomes = []
    for k, case in enumerate(cases):
        tokens = encoded[case.conversation].tokens
        spelled = (
            np.concatenate([tokens[case.start : wrong[k]], decoded[k]])
            if k in wrong
            else tokens[case.start : case.stop]
        )
        ended = len(spelled) and spelled[-1] == chat.control.response_close
        text = chat.decode(spelled[:-1] if ended else spelled)
        result = parse_rehearsal(text, form="inline")
        exact = bool(ended) and result.error is None and _same(result.value, case.real)
        nll = -float(np.sum(logps[case.conversation][case.start : case.stop]))
        outcomes.append(Outcome(case, nll, case.stop - case.start, exact, text.strip()))
    return outcomes


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _decode(
    engine: Engine,
    model: Qwen3,
    grammar: Grammar,
    encoded: Sequence[Trajectory],
    cases: Sequence[Case],
    wrong: Mapping[int, int],
) -> dict[int, np.ndarray]:
    """Greedy continuations of the real history, from where they leave the real response."""
    prompts, params = [], []
    for k, at in wrong.items():
        prompts.append(encoded[cases[k].conversation].tokens[:at])
        left = max(1, grammar.budgets.response_tokens - (at - cases[k].start))
        params.append(SamplingParams(temperature=0.0, max_new_tokens=left, stop_ids=grammar.stop_ids(REHEARSE)))
    out = engine.generate(model, prompts, params) if prompts else []
    return {k: completion.tokens for k, completion in zip(wrong, out, strict=True)}


def _score(model: Qwen3, rows: Sequence[np.ndarray], vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each int32[T]: float32[T] log-probabilities (0 for the first), bool[T] whether a token is the likeliest."""
    graph, params = nnx.split(model)
    out: list[tuple[np.ndarray, np.ndarray]] = [None] * len(rows)  # type: ignore[list-item]
    waiting = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    while waiting:
        width = -(-len(rows[waiting[0]]) // BUCKET) * BUCKET
        count = ROWS
        while count > 1 and count * width > TOKENS:
            count //= 2
        chosen, waiting = waiting[:count], waiting[count:]
        tokens = np.zeros((count, width), np.int32)
        segments = np.zeros((count, width), np.int32)
        for r, i in enumerate(chosen):
            tokens[r, : len(rows[i])], segments[r, : len(rows[i])] = rows[i], 1
        logps, agrees = _forward(graph, params, tokens, segments, vocab_size)
        logps, agrees = np.asarray(logps), np.asarray(agrees)
        for r, i in enumerate(chosen):
            out[i] = logps[r, : len(rows[i])], agrees[r, : len(rows[i])]
    return out


@partial(jax.jit, static_argnums=(0, 4))
def _forward(graph, params, tokens, segments, vocab_size):
    model = nnx.merge(graph, params)
    hidden, _ = model(tokens, segments=segments)

    def some(x):  # a few positions' logits at a time
        states, ids = x
        logits = model.logits(states)[..., :vocab_size]
        taken = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
        return taken - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == ids

    follow = jnp.roll(tokens, -1, axis=1).reshape(-1, BUCKET)
    logps, agrees = jax.lax.map(some, (hidden.reshape(len(follow), BUCKET, -1), follow))
    # What a position says of the next token belongs to that token.
    own = jnp.arange(tokens.shape[1]) > 0
    return tuple(
        jnp.where(own, jnp.roll(x.reshape(tokens.shape), 1, axis=1), jnp.zeros((), x.dtype)) for x in (logps, agrees)
    )
