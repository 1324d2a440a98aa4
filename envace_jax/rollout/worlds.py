"""Where the response to a tool call comes from.

A `World` opens one `Responder` per episode, which gives the responses that come from outside the policy; those are
context. What it leaves `OPEN` is rehearsed, and so is everything where there is no responder:

    simulator None, endpoint None     by the policy in its own token stream (`world.form: inline`): sampled, trained
    simulator                         by the policy, each call under a prompt of its own: sampled, trained
    simulator and endpoint            by another model behind an endpoint: context

That is the one switch between the method and its baselines; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from envace_jax.chat import ToolCall
from envace_jax.config import WorldConfig
from envace_jax.errors import EnvaceError
from envace_jax.rollout.endpoint import Endpoint
from envace_jax.rollout.simulator import Simulator
from envace_jax.tasks import Task
from envace_jax.tasks.mini import Shop

Message = Mapping[str, Any]


class WorldError(EnvaceError):
    """A world that cannot be opened for a task."""


class Environment(Protocol):
    """Something executable that keeps a state, like `tasks.mini.Shop`."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of one call, a JSON value; protocol errors are `{"error_tool_call": {...}}`."""
        ...


class Open:
    """`OPEN`: the response to a call that is to be rehearsed."""

    def __repr__(self) -> str:
        return "OPEN"


OPEN = Open()


class Responder(Protocol):
    """Answers the calls of one episode from outside the policy."""

    def answer(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> Sequence[Any]:
        """A JSON value, or OPEN, for each call, in order. `messages` is the conversation, the calling one included."""
        ...


class World:
    """Opens a source of responses for each episode. See the module for `simulator` and `endpoint`."""

    simulator: Simulator | None = None
    endpoint: Endpoint | None = None

    def open(self, task: Task, episode: int) -> Responder | None:
        """Who answers from outside; None: every call is open."""
        return None

    def at(self, seed: int, step: int) -> World:
        """The world of one step, where its draws depend on it."""
        return self


@dataclass(frozen=True)
class RehearsalWorld(World):
    """Every response is rehearsed: by the policy, or by the model behind `endpoint`."""

    simulator: Simulator | None = None
    endpoint: Endpoint | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None and self.simulator is None:
            raise ValueError("an endpoint answers prompts of its own: give the simulator that writes them")


@dataclass(frozen=True)
class Executed:
    """Calls are executed, one after the other."""

    environment: Environment

    def answer(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> list[Any]:
        return [self.environment.call(call.name, call.arguments) for call in calls]


def start_shop(task: Task) -> Shop:
    """The executable shop that a task of the embedded world starts from. Raises WorldError for another task."""
    if "records" not in task.meta:
        raise WorldError(f"task {task.id!r} has no meta.records to start a shop from: set world.kind=rehearsal")
    return Shop(task.meta["records"])


@dataclass(frozen=True)
class RealWorld(World):
    """Each episode gets an environment of its own. `started` keeps them by episode, for who measures final states."""

    start: Callable[[Task], Environment] = start_shop
    started: dict[int, Environment] = field(default_factory=dict)

    def open(self, task: Task, episode: int) -> Executed:
        self.started[episode] = self.start(task)
        return Executed(self.started[episode])


@dataclass(frozen=True)
class Mixed:
    """Shows a real response with probability `real_fraction`; every call is executed, so that the state stays true."""

    real: Responder
    real_fraction: float
    random: np.random.Generator

    def answer(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> list[Any]:
        values = self.real.answer(calls, messages)
        return [value if self.random.random() < self.real_fraction else OPEN for value in values]


@dataclass(frozen=True)
class MixedWorld(World):
    """Some responses are real, the others are rehearsed: how rehearsal errors add up.

    Which ones depends on (seed, step, episode, number of the call) alone.
    """

    real: World
    real_fraction: float
    simulator: Simulator | None = None
    seed: int = 0
    step: int = 0

    def open(self, task: Task, episode: int) -> Mixed:
        random = np.random.default_rng([self.seed, self.step, episode])
        return Mixed(self.real.open(task, episode), self.real_fraction, random)

    def at(self, seed: int, step: int) -> MixedWorld:
        return replace(self, seed=seed, step=step)


def make_world(config: WorldConfig, *, thinking: bool = True) -> World:
    """The world that a configuration names. `thinking`: whether the rehearsal role thinks, in the simulator form."""
    simulator = Simulator(
        whitelist=config.whitelist,
        references=config.reference_results,
        history=config.history,
        raw_message=config.raw_message,
        thinking=thinking,
    )
    form = simulator if config.form == "simulator" else None
    worlds: dict[str, Callable[[], World]] = {
        "rehearsal": lambda: RehearsalWorld(form),
        "external": lambda: RehearsalWorld(simulator, Endpoint(config.endpoint)),
        "real": RealWorld,
        "mixed": lambda: MixedWorld(RealWorld(), config.real_fraction, form),
    }
    return worlds[config.kind]()
