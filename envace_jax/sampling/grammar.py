"""The grammar of an inline episode: who speaks next, decided by token ids alone.

One pure function, `Grammar.advance`, is the whole table. It works on NumPy scalars, where the host drives an episode
turn by turn, and on arrays [slots] inside the fused loop; so both follow the same rules and spend the same budgets.

    role      sampled                                       what follows
    act       <tool_call> outside thinking                  one more call in this turn
    act       <|im_end|>, no calls or inside thinking       REPLY: the user turn is over, the host decides
    act       <|im_end|> after calls                        CALLS: `first` is forced, the calls are rehearsed in order
    act       <|endoftext|> <|im_start|> a response tag     MALFORMED
    rehearse  </tool_response>, calls left                  NEXT: `between` is forced, the next call is rehearsed
    rehearse  </tool_response>, none left                   DONE: `done` is forced, the actor goes on
    rehearse  any other control id but the thinking pair    MALFORMED
    either    the generation's or the episode's budget      LENGTH
    (DONE, but no assistant turn is left                    TURNS)

`<think>` and `</think>` switch thinking on and off in both roles; it is off where a generation begins.
"""

import dataclasses
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

ACT, REHEARSE = 1, 2  # as in `Trajectory.roles`, where 0 is context


class Event(IntEnum):
    """What a token did to its episode."""

    CONTINUE = 0
    REPLY = 1
    CALLS = 2
    NEXT = 3
    DONE = 4
    MALFORMED = 5
    LENGTH = 6
    TURNS = 7


FINISH_REASONS = {Event.MALFORMED: "malformed", Event.LENGTH: "length", Event.TURNS: "turns"}


class Control(Protocol):
    """The ids the grammar looks at; `chat.ControlIds` has them."""

    think_open: int
    think_close: int
    im_start: int
    im_end: int
    endoftext: int
    call_open: int
    call_close: int
    response_open: int
    response_close: int


class Machine(NamedTuple):
    """Where an episode stands: scalars, or arrays [slots]."""

    role: Any  # int32, ACT or REHEARSE
    thinking: Any  # bool
    calls: Any  # int32, counted in the current assistant turn
    left: Any  # int32, calls of this turn not yet answered, the one being answered included
    generation: Any  # int32, of the episode, from 1
    spent: Any  # int32, tokens sampled in this generation
    turns: Any  # int32, assistant turns begun, this one included


@dataclasses.dataclass(frozen=True)
class Forced:
    """Ids that are context, not sampled: before a turn's first response, between two, and after the last."""

    first: tuple[int, ...]
    between: tuple[int, ...]
    done: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, tuple(int(i) for i in getattr(self, field.name)))


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Tokens sampled in one act or rehearse generation; assistant turns; tokens of the episode, context included."""

    turn_tokens: int
    response_tokens: int
    max_turns: int
    max_length: int


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The rules of an episode, for given ids and budgets."""

    control: Control
    forced: Forced
    budgets: Budgets

    @classmethod
    def from_chat(cls, chat, budgets: Budgets, *, enable_thinking: bool = True) -> "Grammar":
        """With the ids of a `ChatTokenizer`."""
        forced = Forced(chat.response_header(True), chat.response_header(False), chat.responses_done(enable_thinking))
        return cls(chat.control, forced, budgets)

    def start(self) -> Machine:
        """An episode at its first assistant turn."""
        zero = np.int32(0)
        return Machine(np.int32(ACT), np.bool_(False), zero, zero, np.int32(1), zero, np.int32(1))

    def next_turn(self, machine: Machine) -> Machine:
        """After a REPLY and another message of the user."""
        start = self.start()
        return start._replace(generation=machine.generation + 1, turns=machine.turns + 1)

    def turn_fits(self, machine: Machine, length: int, added: int) -> Event:
        """Whether, after a REPLY, `added` tokens of a user message and a turn fit: CONTINUE, or LENGTH or TURNS."""
        if machine.turns >= self.budgets.max_turns:
            return Event.TURNS
        return Event.LENGTH if length + added >= self.budgets.max_length else Event.CONTINUE

    def stop_ids(self, role: int) -> tuple[int, ...]:
        """Ids that end a generation of `role`, well or badly."""
        c = self.control
        if role == ACT:
            return (c.im_end, c.endoftext, c.im_start, c.response_open, c.response_close)
        return (c.response_close, c.im_end, c.endoftext, c.im_start, c.call_open, c.call_close, c.response_open)

    def allowance(self, machine: Machine, length: int) -> int:
        """How many tokens the current generation of a stream of `length` tokens may still draw."""
        return int(min(self._budget(machine.role, np) - machine.spent, self.budgets.max_length - length))

    def forced_after(self, event: int) -> tuple[int, ...]:
        """What is forced after an event."""
        forced = self.forced
        return {Event.CALLS: forced.first, Event.NEXT: forced.between, Event.DONE: forced.done}.get(Event(event), ())

    def advance(self, machine: Machine, token, length, xp=np) -> tuple[Machine, Any]:
        """The episode after one sampled token, and the `Event` it caused.

        length: of the stream, this token included. xp: `numpy` for scalars, `jax.numpy` for arrays [slots].
        """
        c, where = self.control, xp.where
        token = xp.asarray(token)
        act = xp.asarray(machine.role) == ACT

        def one_of(*ids: int):
            hit = token == ids[0]
            for i in ids[1:]:
                hit = hit | (token == i)
            return hit

        calls = machine.calls + where(act & ~machine.thinking & (token == c.call_open), 1, 0)
        turn_ends = act & (token == c.im_end)
        reply = turn_ends & (machine.thinking | (calls == 0))
        call = turn_ends & ~reply
        answered = ~act & (token == c.response_close)
        left = where(call, calls, machine.left - where(answered, 1, 0))
        more, done = answered & (left > 0), answered & (left <= 0)
        malformed = where(
            act,
            one_of(c.endoftext, c.im_start, c.response_open, c.response_close),
            one_of(c.im_start, c.im_end, c.endoftext, c.call_open, c.call_close, c.response_open),
        )
        ends = turn_ends | answered
        spent = machine.spent + 1
        # A generation that ends with its last allowed token is whole. A next one needs its header and a token.
        forced = self.forced
        header = where(call, len(forced.first), where(more, len(forced.between), where(done, len(forced.done), 0)))
        over = (~ends & (spent >= self._budget(machine.role, xp))) | (length + header >= self.budgets.max_length)
        no_turn = done & (machine.turns >= self.budgets.max_turns)

        event = where(call, Event.CALLS, where(more, Event.NEXT, where(done, Event.DONE, Event.CONTINUE)))
        event = where(over, Event.LENGTH, event)
        event = where(no_turn, Event.TURNS, event)
        event = where(reply, Event.REPLY, event)
        event = where(malformed, Event.MALFORMED, event)

        thinking = (machine.thinking | (token == c.think_open)) & (token != c.think_close) & ~ends
        goes_on = (event == Event.CALLS) | (event == Event.NEXT) | (event == Event.DONE)
        return Machine(
            role=where(call, REHEARSE, where(done, ACT, machine.role)),
            thinking=thinking,
            calls=where(done, 0, calls),
            left=left,
            generation=machine.generation + where(goes_on, 1, 0),
            spent=where(goes_on, 0, spent),
            turns=machine.turns + where(event == Event.DONE, 1, 0),
        ), event

    def replay(self, machine: Machine, tokens: np.ndarray, length: int) -> tuple[Machine, Event, int]:
        """`advance` over `tokens` int32[T] sampled after a stream of `length`, up to the first event but CONTINUE.

        Returns the episode, the event, and how many tokens were consumed. Only control ids and the last token can
        matter, so the cost is that of the control ids.
        """
        tokens = np.asarray(tokens)
        ids = [getattr(self.control, name) for name in Control.__annotations__]
        allowed = self.allowance(machine, length)
        at = 0
        for stop in [*np.flatnonzero(np.isin(tokens, ids)).tolist(), len(tokens) - 1]:
            stop = min(stop, allowed - 1)
            if stop < at:
                continue
            machine = machine._replace(spent=machine.spent + (stop - at))
            machine, event = self.advance(machine, tokens[stop], length + stop + 1)
            at = stop + 1
            if event != Event.CONTINUE:
                return machine, Event(int(event)), at
        return machine, Event.CONTINUE, at

    def _budget(self, role, xp):
        return xp.where(xp.asarray(role) == ACT, self.budgets.turn_tokens, self.budgets.response_tokens)
