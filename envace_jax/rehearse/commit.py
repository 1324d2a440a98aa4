"""From private plans to what is done: the one module of the package that holds a real environment.

A user turn is rehearsed, then its calls are executed one by one. Where a real result differs from every rehearsed one
of the same call, reality has departed: the calls that were to follow are not made, and the rest of the turn is
rehearsed again from what has really happened. Every decision is recorded with the plans and the memory it was made on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from envace_jax.chat import ToolCall, Turn
from envace_jax.rehearse.memory import Memory, condense, spell, vote
from envace_jax.rehearse.plans import ACTOR, Plan, RehearseSettings, rehearse, turn_message
from envace_jax.rehearse.policy import ACT, Ask, Message, Policy, Speech, say, with_note


class Environment(Protocol):
    """Something real that keeps a state."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of one call, a JSON value."""
        ...


@dataclass(frozen=True)
class Decision:
    """One thing that was committed: a call with its real result, or the reply.

    round: which rehearsal of the user turn it rests on; 0 before any. plans: those of that rehearsal, at its first
    decision, else empty. chosen: the plan being executed; None where the actor spoke by itself. rehearsed: the results
    this call had in the plans. departed: it had some, and the real one is none of them. withheld: it was not made.
    """

    episode: int
    turn: int
    round: int
    plans: tuple[Plan, ...] = ()
    memory: str = ""
    chosen: int | None = None
    call: ToolCall | None = None
    rehearsed: tuple[Any, ...] = ()
    real: Any = None
    departed: bool = False
    withheld: bool = False
    reply: str | None = None


@dataclass(frozen=True)
class Rehearsal:
    """Told to a listener when a rehearsal is over, before anything of it is committed."""

    round: int
    plans: tuple[Plan, ...]
    memory: Memory
    chosen: int | None


@dataclass
class Course:
    """What became of a conversation. finish: "done", or why the last user turn ended early."""

    messages: list[Message]
    decisions: list[Decision] = field(default_factory=list)
    finish: str = "done"
    plan_tokens: int = 0
    act_tokens: int = 0
    rehearsals: int = 0

    @property
    def departures(self) -> int:
        """How often reality departed from what was rehearsed."""
        return sum(d.departed for d in self.decisions)


def act_task(
    prompt: Sequence[Message],
    user_turns: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
    environment: Environment,
    settings: RehearseSettings,
    counter: Policy,
    *,
    episode: int = 0,
) -> Speech[Course]:
    """A conversation with scripted user turns; `prompt` ends with the first of them."""
    course = Course(list(prompt))
    for turn, text in enumerate(user_turns):
        if turn:
            course.messages.append({"role": "user", "content": text})
        yield from act_turn(course, tools, environment, settings, counter, episode=episode, turn=turn)
        if course.finish != "done":
            break
    return course


def act_turn(
    course: Course,
    tools: Sequence[Mapping[str, Any]],
    environment: Environment,
    settings: RehearseSettings,
    counter: Policy,
    *,
    episode: int = 0,
    turn: int = 0,
    allow: Callable[[ToolCall], bool] = lambda call: True,
    listen: Callable[[Rehearsal | Decision], None] = lambda event: None,
) -> Speech[None]:
    """One user turn, to its reply; `course` grows by what really happened.

    allow: asked before each call; a call it refuses is not made, and the policy is told so.
    listen: told of each rehearsal, and of each decision.
    """
    plans: list[Plan] = []
    memory, chosen, at = Memory("", 0, ()), None, 0
    round, fresh, due = 0, False, settings.plans > 0
    course.finish = "turns"
    for _ in range(settings.max_turns):
        if due and round < settings.max_rehearsals:
            # The rehearsal gets the conversation and nothing else: no environment, no course.
            place = episode, turn * settings.max_rehearsals + round
            plans = yield from rehearse(
                list(course.messages), tools, settings, counter, episode=place[0], round=place[1]
            )
            round, fresh, due, at = round + 1, True, False, 0
            course.rehearsals += 1
            course.plan_tokens += sum(plan.tokens for plan in plans)
            memory, chosen = _condensed(plans, settings, counter)
            listen(Rehearsal(round, tuple(plans), memory, chosen))
        elif due:
            plans, memory, chosen, due = [], Memory("", 0, ()), None, False
        said = _planned(plans, chosen, at)
        if said is None:
            chosen = None
            sequence = 4096 + turn  # positions tell the steps of a turn apart
            stream = with_note(course.messages, memory.text)
            heat = settings.act_temperature, settings.act_top_p
            spoken = yield from say(Ask(ACTOR, ACT, stream, tools, *heat, episode, sequence))
            course.act_tokens += spoken.tokens
            said = spoken.turn
            if said is None or said.error is not None:
                course.finish = "length" if said is None else "malformed"
                return
        at += 1
        common = {"episode": episode, "turn": turn, "round": round, "memory": memory.text, "chosen": chosen}
        if not said.calls:
            course.messages.append(turn_message(said))
            _book(course, listen, Decision(plans=tuple(plans) if fresh else (), reply=said.content, **common))
            course.finish = "done"
            return
        made: list[ToolCall] = []
        results: list[Message] = []
        for call in said.calls:
            decision = _commit(call, plans, environment, allow, common | {"plans": tuple(plans) if fresh else ()})
            fresh = False
            made.append(call)
            results.append({"role": "tool", "content": json.dumps(decision.real, ensure_ascii=False)})
            _book(course, listen, decision)
            due = settings.plans > 0 and (decision.departed or decision.withheld or settings.scope == "call")
            if due:
                break
        course.messages += [turn_message(said, made), *results]


def save_decisions(decisions: Sequence[Decision], path: str | Path) -> None:
    """Append decisions to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(decision), ensure_ascii=False) + "\n" for decision in decisions)


@dataclass
class Guarded:
    """An environment whose every answer is bounded in size and time, and which never raises.

    An answer that does not come, breaks off or is too long is replaced by an ordinary error result that says so.
    """

    environment: Environment
    timeout_s: float = 60.0
    max_bytes: int = 20_000

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(self.environment.call(name, arguments))
            except Exception as error:  # a tool can fail in any way, and the conversation must go on
                answer.append({"error": f"{name} failed: {' '.join(str(error).split())[:300] or type(error).__name__}"})

        # A thread that hangs cannot be ended; as a daemon it does not keep the program.
        thread = threading.Thread(target=ask, name=f"tool {name}", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if not answer:
            return {"error": f"{name} gave no answer within {self.timeout_s:g} s"}
        try:
            text = json.dumps(answer[0], ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return {"error": f"{name} answered with something that is not JSON"}
        size = len(text.encode(errors="replace"))
        if size <= self.max_bytes:
            return answer[0]
        begins = text[: self.max_bytes // 4]
        return {"error": f"{name} answered {size} bytes, more than {self.max_bytes}", "begins": begins}


class DryRun:
    """Takes the place of the real environment where nothing may be done: every call is answered by saying so."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return {"error": "dry run: not executed"}


def _condensed(plans: Sequence[Plan], settings: RehearseSettings, counter: Policy) -> tuple[Memory, int | None]:
    if settings.memory == "context":
        return condense(plans, settings.memory_tokens, counter.count), None
    best = vote(plans)
    return Memory("", 0, ()), best if plans[best].outcome == "done" else None


def _planned(plans: Sequence[Plan], chosen: int | None, at: int) -> Turn | None:
    """The turn that the chosen plan has next: calls, or its reply."""
    if chosen is None:
        return None
    plan = plans[chosen]
    if at < len(plan.turns):
        return Turn(calls=tuple(made.call for made in plan.turns[at]))
    return Turn(content=plan.reply)


def _commit(
    call: ToolCall,
    plans: Sequence[Plan],
    environment: Environment,
    allow: Callable[[ToolCall], bool],
    common: Mapping[str, Any],
) -> Decision:
    rehearsed = tuple(m.result for plan in plans for m in plan.calls if spell(m.call) == spell(call))
    if not allow(call):
        refusal = {"error": "the user did not allow this call"}
        return Decision(call=call, rehearsed=rehearsed, real=refusal, withheld=True, **common)
    real = environment.call(call.name, call.arguments)
    departed = bool(rehearsed) and _canonical(real) not in map(_canonical, rehearsed)
    return Decision(call=call, rehearsed=rehearsed, real=real, departed=departed, **common)


def _book(course: Course, listen: Callable[[Any], None], decision: Decision) -> None:
    course.decisions.append(decision)
    listen(decision)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
