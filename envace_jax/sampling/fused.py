"""Whole inline episodes on the device: acting and rehearsing alternate inside one jitted loop.

    loop = FusedLoop(engine, grammar, SamplingParams(temperature=1.0))
    state = loop.start()
    state = loop.begin(model, state, {slot: prompt}, {slot: key})      prompts shared by a group are prefilled once
    while episodes are left:
        state, report = loop.run(model, state, steps=64)               every K tokens the host looks in
        ...harvest, parse, judge; then for each slot that is not RUNNING, or that the host wants to cut:
        state = loop.next_turn(model, state, {slot: user message})     a REPLIED slot goes on
        state = loop.end(state, [slot])                                or is over, and free for the next `begin`

Each slot holds an episode's stream and its `grammar.Machine`. A step of the loop appends one token to every running
slot: the next of the slot's forced tokens where some are queued, a sampled one otherwise, on which the grammar then
decides. A slot that needs the host (REPLIED) or has ended stands still at no harm to the others, for as long as a
judge may take. Tokens are drawn as the hosted path draws them: by the sequence's key and the position.

Where each role has parameters of its own, `start(split=True)` and every call that takes `model` takes `rehearser` too:
each stream is then kept twice, as either set of parameters sees it, and a token is drawn by its role's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.qwen3 import Qwen3

from . import slots as device
from .engine import Engine
from .grammar import ACT, Event, Grammar, Machine
from .params import SamplingParams, slot_sampling
from .slots import Slots


class Status(IntEnum):
    """Of a slot. The last three are the ends that the grammar knows; the host may end an episode at any time."""

    IDLE = 0
    RUNNING = 1
    REPLIED = 2
    MALFORMED = 3
    LENGTH = 4
    TURNS = 5


_STATUS_AFTER = np.full(len(Event), Status.RUNNING, np.int32)
for _event in (Event.MALFORMED, Event.LENGTH, Event.TURNS):
    _STATUS_AFTER[_event] = Status[_event.name]
_STATUS_AFTER[Event.REPLY] = Status.REPLIED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusedState:
    """Episodes on the device, one a slot."""

    slots: Slots
    machine: Machine  # arrays [slots]
    status: jax.Array  # int32[slots], of Status
    queue: jax.Array  # int32[slots]: the row of forced tokens that is being forced
    head: jax.Array  # int32[slots]: the next token of it
    tail: jax.Array  # int32[slots]: its length; the queue is empty where head == tail
    second: Slots | None = None  # the same streams under the rehearser's parameters, where it has its own


class Recorded(NamedTuple):
    """What was appended to a stream: one slot's arrays [T], or the loop's [slots, K]."""

    tokens: np.ndarray  # int32
    roles: np.ndarray  # int8: 0 context, ACT, REHEARSE
    generations: np.ndarray  # int32: 0 context, else which generation of the episode, from 1
    logps: np.ndarray  # float32; 0 for context
    log_kept_mass: np.ndarray  # float32; 0 for context


_TYPES = Recorded(np.int32, np.int8, np.int32, np.float32, np.float32)


@dataclasses.dataclass(frozen=True)
class Report:
    """How the slots stand when `run` returns, on the host."""

    status: np.ndarray  # int32[slots]
    lengths: np.ndarray  # int32[slots]
    machine: Machine  # arrays [slots]
    steps: int  # tokens the loop went through

    def slots(self, *statuses: Status) -> list[int]:
        """The slots with one of these statuses."""
        return np.flatnonzero(np.isin(self.status, statuses)).tolist()

    def episode(self, slot: int) -> Machine:
        """The machine of one slot, as scalars."""
        return Machine(*(values[slot] for values in self.machine))


class FusedLoop:
    """Runs episodes in the slots of `engine` by the rules of `grammar`.

    params: temperature, top_p and top_k of both roles; what ends a generation is the grammar's affair.
    look_every: most tokens between two looks of the host (the width of the record's buffers).
    Raises ValueError when the grammar's episodes are longer than the engine's slots.
    """

    def __init__(self, engine: Engine, grammar: Grammar, params: SamplingParams, *, look_every: int = 64):
        if grammar.budgets.max_length > engine.max_length:
            raise ValueError(
                f"episodes of {grammar.budgets.max_length} tokens do not fit the engine's max_length="
                f"{engine.max_length}; make it as large, or lower the episode's budget"
            )
        self.engine, self.grammar, self.look_every = engine, grammar, look_every
        self._sampling = slot_sampling(engine.slots, {s: params for s in range(engine.slots)})
        # Row e holds what is forced after event e.
        rows = [grammar.forced_after(event) for event in Event]
        self._forced_lengths = np.array([len(row) for row in rows], np.int32)
        self._forced = np.zeros((len(rows), max(1, *self._forced_lengths)), np.int32)
        for at, row in enumerate(rows):
            self._forced[at, : len(row)] = row
        self._parts: dict[int, list[Recorded]] = {}
        self._set = engine.jit(self._set_body, donate=("state",))
        self._run = engine.jit(self._run_body, static=("graph", "second_graph", "window"), donate=("state",))

    # Calls of the host.

    def start(self, split: bool = False) -> FusedState:
        """All slots idle. split: the rehearser has parameters of its own."""
        self._parts.clear()
        zeros = [jnp.zeros(self.engine.slots, jnp.int32) for _ in range(4)]
        machine = jax.tree.map(lambda x: jnp.full(self.engine.slots, x), self.grammar.start())
        return FusedState(self.engine.start(), machine, *zeros, second=self.engine.start() if split else None)

    def begin(
        self,
        model: Qwen3,
        state: FusedState,
        prompts: Mapping[int, np.ndarray],
        keys: Mapping[int, np.ndarray],
        machines: Mapping[int, Machine] | None = None,
        *,
        rehearser: Qwen3 | None = None,
    ) -> FusedState:
        """Start an episode in each slot of `prompts`, int32[T]; `keys` are the sequences' keys, uint32[2].

        A prompt that several slots share is forwarded once. `machines` continue an episode in a new stream, as where
        history is rendered anew at a user turn; what was not yet harvested of the slot's stream before is dropped.
        Raises ValueError for a prompt that leaves no room for a token.
        """
        limit = self.grammar.budgets.max_length
        for slot, prompt in prompts.items():
            if len(prompt) >= limit:
                raise ValueError(
                    f"the prompt for slot {slot} has {len(prompt)} tokens and leaves no room within the episode's "
                    f"max_length={limit}"
                )
        prefill = self.engine.prefill_groups
        slots = prefill(model, state.slots, prompts, keys)
        second = None if rehearser is None else prefill(rehearser, state.second, prompts, keys)
        for slot, prompt in prompts.items():
            self._parts[slot] = [_context(prompt)]
        fresh = {slot: (machines or {}).get(slot, self.grammar.start()) for slot in prompts}
        return self._put(dataclasses.replace(state, slots=slots, second=second), Status.RUNNING, fresh)

    def next_turn(
        self,
        model: Qwen3,
        state: FusedState,
        messages: Mapping[int, np.ndarray],
        *,
        rehearser: Qwen3 | None = None,
    ) -> FusedState:
        """Append the user's next message, int32[T] up to and with the generation prompt, to REPLIED slots.

        Ask `grammar.turn_fits` before. Raises ValueError for a slot that did not reply.
        """
        status = np.asarray(state.status)
        for slot in messages:
            if status[slot] != Status.REPLIED:
                raise ValueError(f"slot {slot} is {Status(int(status[slot])).name}; only a REPLIED slot takes a turn")
        machine = Machine(*(np.asarray(values) for values in state.machine))
        slots = self.engine.extend(model, state.slots, messages)
        second = None if rehearser is None else self.engine.extend(rehearser, state.second, messages)
        for slot, message in messages.items():
            self._parts[slot].append(_context(message))
        fresh = {slot: self.grammar.next_turn(Machine(*(values[slot] for values in machine))) for slot in messages}
        return self._put(dataclasses.replace(state, slots=slots, second=second), Status.RUNNING, fresh)

    def end(self, state: FusedState, slots: Sequence[int]) -> FusedState:
        """Free slots, whatever they do. What they recorded can still be harvested until the next `begin`."""
        return self._put(state, Status.IDLE, {slot: self.grammar.start() for slot in slots})

    def run(
        self,
        model: Qwen3,
        state: FusedState,
        steps: int | None = None,
        enough: int | None = None,
        *,
        rehearser: Qwen3 | None = None,
    ) -> tuple[FusedState, Report]:
        """Let the RUNNING slots go on by at most `steps` tokens (`look_every` by default and at most).

        Returns earlier when none runs, or when `enough` slots have stopped running.
        """
        steps = self.look_every if steps is None else steps
        if not 1 <= steps <= self.look_every:
            raise ValueError(f"steps must lie in 1..look_every={self.look_every}, found {steps}")
        status, lengths = np.asarray(state.status), np.asarray(state.slots.lengths)
        running = status == Status.RUNNING
        rows = self.engine.rows(np.flatnonzero(running).tolist())
        graph, params = self.engine.split(model)
        second_graph, second_params = (None, None) if rehearser is None else self.engine.split(rehearser)

        def run(state: FusedState, rows: np.ndarray | None, window: int, steps: int, enough: int):
            return self._run(
                graph=graph,
                params=params,
                second_graph=second_graph,
                second_params=second_params,
                state=state,
                rows=rows,
                sampling=self._sampling if rows is None else jax.tree.map(lambda x: x[rows], self._sampling),
                steps=np.int32(steps),
                enough=np.int32(enough),
                window=window,
            )

        if self.engine.ahead(f"run {id(self)}"):
            for some, window in self.engine.decoding_shapes():
                state, *_ = run(state, some, window, 0, 1)
        window = self.engine.window(int(lengths[running].max(initial=0)) + steps, rows)
        enough = self.engine.slots + 1 if enough is None else enough
        state, record, counts, taken = run(state, rows, window, steps, enough)
        record, counts = Recorded(*(np.asarray(x) for x in record)), np.asarray(counts)
        for row in np.flatnonzero(counts).tolist():
            slot = row if rows is None else int(rows[row])
            self._parts[slot].append(Recorded(*(x[row, : counts[row]].copy() for x in record)))
        return state, self.report(state, int(taken))

    def report(self, state: FusedState, steps: int = 0) -> Report:
        """How the slots stand."""
        machine = Machine(*(np.asarray(values) for values in state.machine))
        return Report(np.asarray(state.status), np.asarray(state.slots.lengths), machine, steps)

    def harvest(self, slot: int) -> Recorded:
        """Everything appended to the slot's stream since it began or was last harvested, context included."""
        parts = self._parts.get(slot, [])
        self._parts[slot] = []
        return Recorded(*(np.concatenate([np.zeros(0, t), *(p[i] for p in parts)]) for i, t in enumerate(_TYPES)))

    # What is compiled.

    def _put(self, state: FusedState, status: Status, machines: Mapping[int, Machine]) -> FusedState:
        """Set status and machine of some slots, their queues empty."""
        count = self.engine.slots
        rows = np.full(count, count, np.int32)
        rows[: len(machines)] = list(machines)
        start = self.grammar.start()
        values = [np.full(count, default) for default in start]
        for at, machine in enumerate(machines.values()):
            for column, value in zip(values, machine, strict=True):
                column[at] = value
        return self._set(state=state, rows=rows, machine=Machine(*values), status=np.int32(status))

    def _set_body(self, state, rows, machine, status):
        def put(old, new):
            return old.at[rows].set(new, mode="drop")

        return dataclasses.replace(
            state,
            slots=self.engine.pin(state.slots),
            second=None if state.second is None else self.engine.pin(state.second),
            machine=jax.tree.map(put, state.machine, machine),
            status=put(state.status, status),
            queue=put(state.queue, 0),
            head=put(state.head, 0),
            tail=put(state.tail, 0),
        )

    def _run_body(
        self, graph, params, state, rows, sampling, steps, enough, window, second_graph=None, second_params=None
    ):
        models = [self.engine.merge(graph, params)]
        if second_graph is not None:
            models.append(self.engine.merge(second_graph, second_params))
        whole = [state.slots, state.second][: len(models)]
        rest = dataclasses.replace(state, slots=None, second=None)
        part = rest if rows is None else jax.tree.map(lambda x: x[rows], rest)
        parts = [device.take(slots, rows, window) for slots in whole]
        part, parts, *read = self._loop(models, parts, part, sampling, steps, enough, window)
        if rows is not None:
            part = jax.tree.map(lambda old, new: old.at[rows].set(new), rest, part)
        slots = [self.engine.pin(device.put(old, new, rows)) for old, new in zip(whole, parts, strict=True)]
        state = dataclasses.replace(part, slots=slots[0], second=slots[1] if len(slots) > 1 else None)
        return state, *device.everywhere(read, self.engine.mesh)

    def _loop(self, models, streams, state, sampling, steps, enough, window):
        """models, streams: the policy's, and the rehearser's where it has its own; `state` without any."""
        engine, grammar = self.engine, self.grammar
        forced_tokens, forced_lengths = jnp.asarray(self._forced), jnp.asarray(self._forced_lengths)
        status_after = jnp.asarray(_STATUS_AFTER)
        began = jnp.sum(state.status == Status.RUNNING)
        count = streams[0].count
        never = jnp.zeros(count, bool)

        def proceed(carry):
            step, state, *_ = carry
            running = jnp.sum(state.status == Status.RUNNING)
            return (step < steps) & (running > 0) & (began - running < enough)

        def body(carry):
            step, state, streams, record, counts = carry
            running = state.status == Status.RUNNING
            forced = running & (state.head < state.tail)
            sampled = running & ~forced
            logits = [model.logits(slots.hidden) for model, slots in zip(models, streams, strict=True)]
            logits = logits[0] if len(logits) == 1 else jnp.where((state.machine.role == ACT)[:, None], *logits)
            drawn, logps, kept = device.draw(logits, streams[0], sampling, never, engine.vocab_size)
            tokens = jnp.where(forced, forced_tokens[state.queue, state.head], drawn)

            def write(buffer, values, where):
                return buffer.at[:, step].set(jnp.where(where, values, 0).astype(buffer.dtype))

            record = Recorded(
                tokens=write(record.tokens, tokens, running),
                roles=write(record.roles, state.machine.role, sampled),
                generations=write(record.generations, state.machine.generation, sampled),
                logps=write(record.logps, logps, sampled),
                log_kept_mass=write(record.log_kept_mass, kept, sampled),
            )
            streams = [
                engine.pin(device.push(model, slots, tokens, running, window))
                for model, slots in zip(models, streams, strict=True)
            ]
            machine, event = grammar.advance(state.machine, tokens, streams[0].lengths, jnp)
            queued = jnp.where(sampled, forced_lengths[event], 0)
            state = dataclasses.replace(
                state,
                machine=jax.tree.map(
                    lambda new, old: jnp.where(sampled, new, old).astype(old.dtype), machine, state.machine
                ),
                status=jnp.where(sampled, status_after[event], state.status),
                queue=jnp.where(queued > 0, event, state.queue).astype(jnp.int32),
                head=jnp.where(queued > 0, 0, state.head + forced),
                tail=jnp.where(queued > 0, queued, state.tail),
            )
            return step + 1, state, streams, record, counts + running

        shape = (count, self.look_every)
        record = Recorded(*(jnp.zeros(shape, t) for t in _TYPES))
        taken, state, streams, record, counts = jax.lax.while_loop(
            proceed, body, (jnp.int32(0), state, streams, record, jnp.zeros(count, jnp.int32))
        )
        return state, streams, record, counts, taken


def _context(tokens: np.ndarray) -> Recorded:
    tokens = np.asarray(tokens, np.int32)
    return Recorded(tokens, *(np.zeros(len(tokens), t) for t in _TYPES[1:]))
