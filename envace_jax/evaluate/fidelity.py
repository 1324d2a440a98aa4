"""`envace evaluate fidelity`: how true the rehearsed world is.

Teacher-forced, each call is rehearsed after the real history. In closed loop the calls are the same, but the history
holds the policy's own earlier responses, so that errors may feed on errors. Both are greedy, and both report every
measure over all calls, by step (how many calls of the conversation came before), and over two subsets that a
rehearser of gold calls alone would never be asked about: reads after a write, and calls that must fail.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envace_jax.chat import ChatTokenizer
from envace_jax.config import ConfigError
from envace_jax.evaluate.bfcl import bfcl_conversations
from envace_jax.evaluate.floors import RecordedCall, by_category, floors, read_calls, read_records, spell_call
from envace_jax.evaluate.metrics import MEASURES, is_error, score_response
from envace_jax.evaluate.plots import plot_fidelity
from envace_jax.evaluate.recorded import Conversation, from_record, mini_conversations
from envace_jax.evaluate.rehearsals import Case, recorded_cases, rehearse_recorded
from envace_jax.evaluate.results import Measure, Result, mean_measure, report, share_measure
from envace_jax.rollout import encode_conversation
from envace_jax.sampling import REHEARSE, Engine, Grammar, SamplingParams
from models.qwen3 import Qwen3

LAST_STEP = 8  # calls from this step on are reported together


@dataclass(frozen=True)
class Rehearsed:
    """One rehearsed call: where it stands and what came of it. nll: nats over `tokens` tokens; None in closed loop."""

    conversation: int
    step: int
    call: str
    predicted: str
    real: str
    after_write: bool
    must_fail: bool
    reads: bool
    nll: float | None = None
    tokens: int = 0


def print_floors(file: str | Path, *, category: str | None = None, as_json: bool = False) -> dict[str, Any]:
    """The floors of the recorded calls in `file`, of one category (None: the first), in percent.

    Raises ConfigError for a file that cannot be read, or a category that it does not have.
    """
    calls = by_category(read_calls(file))
    category = next(iter(calls)) if category is None else category
    if category not in calls:
        raise ConfigError(f"{file} has no category {category!r}: use one of {', '.join(calls)}")
    found = floors(calls[category])
    if as_json:
        sys.stdout.write(json.dumps({"category": category, "count": len(calls[category]), **found}, indent=2) + "\n")
    else:
        print(f"{category}, {len(calls[category])} calls, percent")
        for name, values in found.items():
            print(f"  {name:10}" + "  ".join(f"{measure} {value:.1f}" for measure, value in values.items()))
    return found


def fidelity(
    model: str,
    *,
    triples: str | Path | None = None,
    bfcl: str | None = None,
    tasks: int = 64,
    split: str = "test",
    visibility: str = "full",
    seed: int = 0,
    max_length: int = 1024,
    response_tokens: int = 96,
    thinking: bool = False,
    as_json: bool = False,
    out: str | Path | None = None,
    plot: str | Path | None = None,
) -> Result:
    """Measures a model directory on `tasks` tasks of the embedded world, or on other calls, and reports.

    bfcl: a multi-turn category of BFCL, whose first `tasks` entries are taken (see `evaluate.bfcl`).
    Each line of the file `triples` holds `tools, history, call, response`: the history in the OpenAI chat format, the
    call as `{"name", "arguments"}`, and optionally `writes`, the names of the tools that change the world.
    Raises EnvaceError for a model, a file or a setting that must be mended.
    """
    from envace_jax.train import load_model, tokenizer_directory

    if bfcl is not None:
        conversations = bfcl_conversations(bfcl, tasks, seed=seed)
        source = {"world": "bfcl", "category": bfcl, "tasks": tasks}
    elif triples is None:
        conversations = mini_conversations(tasks, split=split, visibility=visibility, seed=seed)
        source = {"world": "mini", "split": split, "tasks": tasks, "visibility": visibility}
    else:
        conversations = [from_record(r, f"{triples}, record {i}") for i, r in enumerate(read_records(triples))]
        source = {"triples": str(triples)}
    policy, chat = load_model(model), ChatTokenizer.from_pretrained(tokenizer_directory(model))
    engine = Engine(policy.config, slots=min(64, len(conversations)), max_length=max_length, vocab_size=chat.vocab_size)
    forced, closed = rehearse_both(engine, policy, chat, conversations, response_tokens, thinking=thinking)
    if not forced:
        raise ConfigError(f"no call fits max_length={max_length}: raise --max-length")
    settings = {"model": model, **source, "seed": seed, "max_length": max_length, "temperature": 0.0}
    result = summarise(forced, closed, settings)
    report(result, as_json=as_json, out=out)
    if plot is not None:
        plot_fidelity(result, plot)
    return result


def rehearse_both(
    engine: Engine,
    model: Qwen3,
    chat: ChatTokenizer,
    conversations: Sequence[Conversation],
    response_tokens: int = 96,
    *,
    thinking: bool = False,
) -> tuple[list[Rehearsed], list[Rehearsed]]:
    """Every call rehearsed teacher-forced, and in closed loop; calls beyond the engine's slots are left out of both."""
    from envace_jax.sampling import Budgets

    grammar = Grammar.from_chat(chat, Budgets(1, response_tokens, 1, engine.max_length), enable_thinking=thinking)
    encoded = [encode_conversation(chat, c.messages, c.tools, thinking=thinking).tokens for c in conversations]
    cases = [_cases(chat, i, c, engine.max_length, thinking) for i, c in enumerate(conversations)]
    outcomes = rehearse_recorded(
        engine, model, chat, [(c.messages, c.tools) for c in conversations], grammar, thinking=thinking
    )
    predicted = {(o.case.conversation, o.case.start): o for o in outcomes}
    forced, closed = [], []
    own = _closed_loop(engine, model, chat, grammar, encoded, cases)
    for i, conversation in enumerate(conversations):
        texts = _recorded_texts(conversation.messages)
        for step, case in enumerate(cases[i]):
            if conversation.only_last and step + 1 < len(texts):
                continue
            name, call, real = texts[step]
            facts = (call, real, case.after_write, is_error(real), name not in conversation.writes)
            teacher = predicted[i, case.start]
            forced.append(_rehearsed(i, step, facts, teacher.predicted, teacher.nll, teacher.tokens))
            if (i, step) in own:
                closed.append(_rehearsed(i, step, facts, own[i, step]))
    return forced, closed


def summarise(forced: Sequence[Rehearsed], closed: Sequence[Rehearsed], settings: Mapping[str, Any]) -> Result:
    """Measures `LOOP/MEASURE`, `LOOP/MEASURE/SUBSET` and `LOOP/exact_match/step_N`; `forced/nll` is per token."""
    measures: dict[str, Measure] = {}
    subsets: dict[str, Callable[[Rehearsed], bool]] = {
        "": lambda r: True,
        "/read_after_write": lambda r: r.after_write and r.reads,
        "/must_fail": lambda r: r.must_fail,
    }
    for loop, calls in (("forced", forced), ("closed", closed)):
        scores = [score_response(r.predicted, r.real) for r in calls]
        for subset, belongs in subsets.items():
            chosen = [i for i, r in enumerate(calls) if belongs(r)]
            for measure in MEASURES:
                values = [scores[i][measure] for i in chosen]
                name = f"{loop}/{measure}{subset}"
                if measure in ("exact_match", "error_agreement"):
                    measures[name] = share_measure([v == 1.0 for v in values])
                else:
                    measures[name] = mean_measure(values, [calls[i].conversation for i in chosen])
        for step in range(LAST_STEP + 1):
            chosen = [i for i, r in enumerate(calls) if min(r.step, LAST_STEP) == step]
            if chosen:
                more = "+" if step == LAST_STEP else ""
                measures[f"{loop}/exact_match/step_{step}{more}"] = share_measure(
                    [scores[i]["exact_match"] == 1.0 for i in chosen]
                )
        scored = [r for r in calls if r.nll is not None and r.tokens]
        if scored:
            per_token = [r.nll / r.tokens for r in scored]
            clusters, weights = [r.conversation for r in scored], [r.tokens for r in scored]
            measures[f"{loop}/nll"] = mean_measure(per_token, clusters, weights)
    recorded = [RecordedCall("all", str(r.conversation), r.call.partition("(")[0], r.call, r.real) for r in forced]
    shares = {name: {m: v / 100 for m, v in values.items()} for name, values in floors(recorded).items()}
    return Result("fidelity", settings, measures, shares)


def _closed_loop(
    engine: Engine,
    model: Qwen3,
    chat: ChatTokenizer,
    grammar: Grammar,
    encoded: Sequence[np.ndarray],
    cases: Sequence[Sequence[Case]],
) -> dict[tuple[int, int], str]:
    """(conversation, step) -> response, the real ones before it replaced by the policy's; all conversations at once."""
    streams = {i: tokens[: c[0].start] for i, (tokens, c) in enumerate(zip(encoded, cases, strict=True)) if c}
    stop, close = grammar.stop_ids(REHEARSE), chat.control.response_close
    own: dict[tuple[int, int], str] = {}
    step = 0
    while streams:
        room = {i: engine.max_length - len(s) for i, s in streams.items()}
        streams = {i: s for i, s in streams.items() if room[i] > 0}
        params = [
            SamplingParams(0.0, max_new_tokens=min(room[i], grammar.budgets.response_tokens), stop_ids=stop)
            for i in streams
        ]
        sampled = engine.generate(model, list(streams.values()), params) if streams else []
        ongoing = {}
        for (i, stream), completion in zip(streams.items(), sampled, strict=True):
            tokens = completion.tokens
            body = tokens[:-1] if len(tokens) and int(tokens[-1]) in stop else tokens
            own[i, step] = chat.decode(body).strip()
            if step + 1 < len(cases[i]):
                between = encoded[i][cases[i][step].stop : cases[i][step + 1].start]
                ongoing[i] = np.concatenate([stream, body, [close], between]).astype(np.int32)
        streams, step = ongoing, step + 1
    return own


def _cases(chat: ChatTokenizer, i: int, c: Conversation, max_length: int, thinking: bool) -> list[Case]:
    trajectory = encode_conversation(chat, c.messages, c.tools, thinking=thinking)
    return [case for case in recorded_cases(i, c.messages, trajectory, c.writes) if case.stop <= max_length]


def _recorded_texts(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(tool, call, response) of every answered call, in order."""
    out, pending = [], []
    for message in messages:
        if message["role"] == "assistant":
            pending = [call["function"] for call in message.get("tool_calls") or ()]
        elif message["role"] == "tool":
            function = pending.pop(0)
            out.append((function["name"], spell_call(function["name"], function["arguments"]), message["content"]))
    return out


def _rehearsed(
    conversation: int,
    step: int,
    facts: tuple[str, str, bool, bool, bool],
    predicted: str,
    nll: float | None = None,
    tokens: int = 0,
) -> Rehearsed:
    call, real, after_write, must_fail, reads = facts
    return Rehearsed(conversation, step, call, predicted, real, after_write, must_fail, reads, nll, tokens)
