"""Where the response to a tool call comes from.

A `World` opens one source of responses per episode. None means that the policy answers by itself, in its own token
stream: its rehearsal is sampled and trained. A `Responder` answers from outside; its responses are context. That is
the one switch between the method and its baselines, so a further world (an endpoint that simulates, say) is one more
`Responder` and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envace_jax.chat import ToolCall
from envace_jax.config import WorldConfig
from envace_jax.errors import ConfigError, EnvaceError
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


class Responder(Protocol):
    """Answers the calls of one episode from outside the policy."""

    def answer(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> Sequence[Any]:
        """A JSON value for each call, in order. `messages` is the conversation, the calling message included."""
        ...


class World(Protocol):
    """Opens a source of responses for an episode: a `Responder`, or None where the policy rehearses."""

    def open(self, task: Task, episode: int) -> Responder | None: ...


class RehearsalWorld:
    """The policy is its own environment."""

    def open(self, task: Task, episode: int) -> None:
        return None


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
class RealWorld:
    """Each episode gets an environment of its own. `started` keeps them by episode, for who measures final states."""

    start: Callable[[Task], Environment] = start_shop
    started: dict[int, Environment] = field(default_factory=dict)

    def open(self, task: Task, episode: int) -> Executed:
        self.started[episode] = self.start(task)
        return Executed(self.started[episode])


@dataclass(frozen=True)
class MixedWorld:
    """A share of the episodes, spread evenly over their numbers, runs in `real`; the others in `other`."""

    real: World
    other: World
    real_fraction: float

    def open(self, task: Task, episode: int) -> Responder | None:
        is_real = int((episode + 1) * self.real_fraction) > int(episode * self.real_fraction)
        return (self.real if is_real else self.other).open(task, episode)


def make_world(config: WorldConfig) -> World:
    """The world that a configuration names. Raises ConfigError for one that is not there."""
    if config.form != "inline":
        raise ConfigError(f"world.form={config.form} is not available yet: set world.form=inline")
    worlds: dict[str, Callable[[], World]] = {
        "rehearsal": RehearsalWorld,
        "real": RealWorld,
        "mixed": lambda: MixedWorld(RealWorld(), RehearsalWorld(), config.real_fraction),
    }
    if config.kind not in worlds:
        raise ConfigError(f"world.kind={config.kind} is not available yet: set one of {', '.join(worlds)}")
    return worlds[config.kind]()
