"""Private plans: one user turn, or the rest of one, unrolled with the policy's own rehearsed responses.

*Parallel* plans do not know of each other and are sampled as one batch. Each *sequential* one sees the memory of those
before it, with the critique its policy gave of each. Nothing here can touch a real environment: there is no parameter
through which one could come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envace_jax.chat import ToolCall, Turn, is_error_tool_call
from envace_jax.errors import ConfigError
from envace_jax.rehearse.memory import condense
from envace_jax.rehearse.policy import ACT, REHEARSE, Ask, Message, Policy, Speech, prompt, say, together, with_note

ACTOR, PLANNER, REHEARSER = "actor", "planner", "rehearser"
MODES, SCOPES, MEMORIES = ("parallel", "sequential"), ("turn", "call"), ("context", "vote")


@dataclass(frozen=True)
class RehearseSettings:
    """How to rehearse before acting.

    plans: how many; 0 is no rehearsal. scope: what is committed before rehearsing again, the user turn or one call.
    memory: "context" puts the memory before the actor, who then acts; "vote" puts no text into any prompt of the actor
        and executes the plan that most plans agree on, which suits a policy that never saw such notes.
    memory_tokens: budget of the memory; None: all of it is kept. critique: ask for one after each sequential plan.
    temperature, top_p: of plans and rehearsals. act_temperature, act_top_p: of the actor's real turns.
    max_turns: assistant turns of a plan, and of a user turn. max_rehearsals: how often one user turn is rehearsed.
    """

    plans: int = 2
    mode: Literal["parallel", "sequential"] = "parallel"
    scope: Literal["turn", "call"] = "turn"
    memory: Literal["context", "vote"] = "context"
    memory_tokens: int | None = 1000
    critique: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    act_temperature: float = 0.6
    act_top_p: float = 0.95
    max_turns: int = 8
    max_rehearsals: int = 4

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("scope", SCOPES), ("memory", MEMORIES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"rehearse.{name} is one of {', '.join(choices)}, found {getattr(self, name)!r}")
        if self.plans < 0 or self.max_turns < 1 or self.max_rehearsals < 1:
            raise ConfigError("rehearse.plans must not be negative, max_turns and max_rehearsals must be positive")
        if self.memory_tokens is not None and self.memory_tokens < 0:
            raise ConfigError(f"rehearse.memory_tokens must not be negative, found {self.memory_tokens}")


@dataclass(frozen=True)
class Rehearsed:
    """A call and the result it had in a rehearsal."""

    call: ToolCall
    result: Any


@dataclass(frozen=True)
class Plan:
    """One private plan.

    turns: the calls of each assistant turn, with rehearsed results. reply: what the user would be told.
    outcome: "done", or why it ended: "malformed" turn, "unreadable" response, "error_tool_call", "length", "turns".
    """

    turns: tuple[tuple[Rehearsed, ...], ...]
    reply: str = ""
    outcome: str = "done"
    critique: str = ""
    tokens: int = 0

    @property
    def calls(self) -> tuple[Rehearsed, ...]:
        """All calls, in order."""
        return tuple(made for turn in self.turns for made in turn)


def rehearse(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    settings: RehearseSettings,
    counter: Policy,
    *,
    episode: int = 0,
    round: int = 0,
) -> Speech[list[Plan]]:
    """`settings.plans` plans for what comes next in a conversation that ends with a user or a tool message.

    counter: whose tokens the memory's budget counts. round: how often this user turn was rehearsed before.
    """
    first = 1 + round * 64
    if settings.mode == "parallel":
        notes = [""] * settings.plans
        plans = [_plan(messages, tools, settings, n, episode, first + k) for k, n in enumerate(notes)]
        return (yield from together(plans))
    done: list[Plan] = []
    for k in range(settings.plans):
        note = condense(done, settings.memory_tokens, counter.count).text
        done.append((yield from _plan(messages, tools, settings, note, episode, first + k, settings.critique)))
    return done


def turn_message(turn: Turn, calls: Sequence[ToolCall] | None = None) -> dict[str, Any]:
    """An assistant turn as a message, with `calls` in place of its own where they are given."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    calls = turn.calls if calls is None else calls
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)}}
            for c in calls
        ]
    return message


def _plan(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    settings: RehearseSettings,
    note: str,
    episode: int,
    sequence: int,
    critique: bool = False,
) -> Speech[Plan]:
    stream = with_note(messages, note)
    common = (settings.temperature, settings.top_p, episode, sequence)
    turns: list[tuple[Rehearsed, ...]] = []
    tokens, reply, outcome = 0, "", "turns"
    for _ in range(settings.max_turns):
        spoken = yield from say(Ask(PLANNER, ACT, stream, tools, *common))
        tokens += spoken.tokens
        turn = spoken.turn
        if turn is None or turn.error is not None:
            outcome = "length" if turn is None else "malformed"
            break
        stream = [*stream, turn_message(turn)]
        if not turn.calls:
            reply, outcome = turn.content, "done"
            break
        made: list[Rehearsed] = []
        for call in turn.calls:
            answer = yield from say(Ask(REHEARSER, REHEARSE, stream, tools, *common))
            tokens += answer.tokens
            if answer.response is None or answer.response.error is not None:
                outcome = "length" if answer.response is None else "unreadable"
                break
            made.append(Rehearsed(call, answer.response.value))
            stream = [*stream, {"role": "tool", "content": json.dumps(answer.response.value, ensure_ascii=False)}]
        turns.append(tuple(made))
        if len(made) < len(turn.calls):
            break
        if any(is_error_tool_call(m.result) for m in made):
            outcome = "error_tool_call"
            break
    said = ""
    if critique and outcome == "done":
        asked = [*stream, {"role": "user", "content": prompt("critique")}]
        spoken = yield from say(Ask(PLANNER, ACT, asked, tools, *common))
        tokens += spoken.tokens
        said = spoken.turn.content if spoken.turn is not None and spoken.turn.error is None else ""
    return Plan(tuple(turns), reply, outcome, said, tokens)
