"""The rules of one episode, on the host: what was sampled, what it means, what comes next.

Both rollout paths feed an `Episode` one sampled generation after the other and ask what context follows. Which ids end
a generation and whose turn is next is the grammar's affair (`sampling.grammar`); what a generation *says* is decided
here: calls and responses are parsed, the world is asked, user turns are judged and the next one is scripted.

    episode = Episode(rules, task, responder)       its prompt is to be prefilled
    episode.take(tokens, logps, kept)               a whole sampled generation
        episode.finish                              why it is over, or None
        episode.replied                             the user turn is over: episode.settle(episode.verdict())
        episode.context                             int32[T], what to append before the next generation is sampled
        episode.restarts                            the context is a new prompt, not to be appended but to start from
        episode.asked                               prompts of calls that await rehearsal: episode.rehearsed(answers)

An episode is cut at the first generation that cannot be understood; that generation is kept, and trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envace_jax.chat import ChatTokenizer, Turn, is_error_tool_call, parse_rehearsal
from envace_jax.rewards import Judge, Step, TurnVerdict, episode_reward, judge_turn
from envace_jax.rollout.recorded import response_tokens
from envace_jax.rollout.simulator import Simulator
from envace_jax.rollout.trajectory import ACT, TokenStream, Trajectory
from envace_jax.rollout.worlds import OPEN, Responder
from envace_jax.sampling.grammar import FINISH_REASONS, Event, Grammar
from envace_jax.tasks import Task

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Answer:
    """One rehearsal under a prompt of its own. `stream`: what was sampled, where the policy rehearsed."""

    text: str
    stream: TokenStream | None = None


@dataclass(frozen=True)
class Rules:
    """What all episodes of a rollout share.

    empty_penalty: taken from an empty generation's own reward.
    history_reasoning: at a new user message, "keep" goes on in the same stream; "drop" writes the history anew as the
        chat template would, without earlier reasoning: a new segment. The episode's budget counts all segments.
    simulator: writes the prompts of rehearsals; None: responses are rehearsed in the actor's own stream.
    """

    chat: ChatTokenizer
    grammar: Grammar
    judge: Judge
    thinking: bool = True
    empty_penalty: float = 0.1
    history_reasoning: str = "keep"
    simulator: Simulator | None = None

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: what the actor sees before its first token."""
        return self.chat.render(task.prompt, task.tools, True, self.thinking)


class Episode:
    """One episode. `responder` answers its calls; None: the policy does. `prompt`: the rendered one, if at hand."""

    def __init__(
        self, rules: Rules, task: Task, responder: Responder | None = None, *, prompt: np.ndarray | None = None
    ):
        self.rules, self.task, self.responder = rules, task, responder
        self.machine = rules.grammar.start()
        self.prompt = rules.prompt(task) if prompt is None else prompt
        self.stream = TokenStream()
        self.stream.context(self.prompt)
        self.messages: list[Mapping[str, Any]] = task.prompt
        self.context = _NOTHING
        self.restarts = False
        self.replied = False
        self.asked: list[list[dict[str, str]]] = []
        self.rehearsals = 0  # under prompts of their own
        self.finish: str | None = None
        self.valid = True
        self.scores: list[float] = []
        self.satisfied: list[str] = []
        self.parsed = 0  # generations that could be read
        self.errors: list[str] = []
        self._penalties: dict[int, float] = {}
        self._steps: list[Step] = []
        self._turn_start = len(self.messages)  # where the messages of this user turn begin
        self._calls = 0  # of the assistant turn being answered
        self._results: list[Mapping[str, Any]] = []
        self._failed = False  # a result of this assistant turn is a protocol error
        self._failed_before = False  # one of an earlier user turn was
        self._given: list[Any] = []  # response to each call of this assistant turn, or OPEN
        self._sampled: list[tuple[TokenStream, float]] = []  # rehearsals by the policy, and what each is fined
        if len(self.prompt) >= rules.grammar.budgets.max_length:
            self._end("length")

    @property
    def length(self) -> int:
        """Tokens so far, of all segments, the context that is to be appended included."""
        return self.stream.length

    @property
    def role(self) -> int:
        """Who is to speak, ACT or REHEARSE."""
        return int(self.machine.role)

    def allowance(self) -> int:
        """How many tokens the next generation may have."""
        return self.rules.grammar.allowance(self.machine, self.length)

    def take(self, tokens: np.ndarray, logps: np.ndarray, kept: np.ndarray | None = None) -> None:
        """One whole sampled generation, int32[T] with float32[T] log-probabilities: to its end id or budget."""
        role = self.role
        machine, event, used = self.rules.grammar.replay(self.machine, tokens, self.length)
        tokens = np.asarray(tokens, np.int32)[:used]
        generation = self.stream.generation(role, tokens, logps[:used], None if kept is None else kept[:used])
        self.machine, self.context = machine, _NOTHING
        if event == Event.CONTINUE:  # a stream that was stopped from outside, by the engine's own length
            event = Event.LENGTH
        if role == ACT:
            empty = self._take_act(tokens, event, int(machine.calls))
        else:
            empty = self._take_response(tokens, event)
        if empty:
            self._penalties[generation] = self.rules.empty_penalty

    def take_context(self) -> np.ndarray:
        """`context`, which is then no longer due."""
        context, self.context, self.restarts = self.context, _NOTHING, False
        return context

    def verdict(self) -> TurnVerdict:
        """The judge's verdict on the user turn that just ended. Changes nothing: it may be asked in a thread."""
        turn = len(self.scores)
        history = self.messages[: self._turn_start]
        return judge_turn(self.task, turn, history, self._steps, self.rules.judge, failed_before=self._failed_before)

    def settle(self, verdict: TurnVerdict) -> None:
        """Book the verdict on a user turn, and script the next one if there is one."""
        self.replied = False
        self.scores.append(verdict.score)
        self.satisfied += verdict.satisfied
        self.valid = self.valid and verdict.valid
        users = self.task.user_turns
        if len(self.scores) >= len(users):
            return self._end("done")
        if not verdict.proceed:
            return self._end("checklist")
        message = {"role": "user", "content": users[len(self.scores)]}
        drop = self.rules.history_reasoning == "drop"
        if drop:
            history = [*self.messages, message]
            context = self.rules.chat.render(history, self.task.tools, True, self.rules.thinking)
        else:
            context = self.rules.chat.user(message["content"], self.rules.thinking)
        event = self.rules.grammar.turn_fits(self.machine, self.length, len(context))
        if event != Event.CONTINUE:
            return self._end(FINISH_REASONS[event])
        self.machine = self.rules.grammar.next_turn(self.machine)
        self.messages.append(message)
        self._steps, self._turn_start = [], len(self.messages)
        if drop:
            self.stream.segment()
            self.restarts = True
        self._append(context)

    def abandon(self, reason: str) -> None:
        """End an episode whose infrastructure failed; its record is not valid."""
        self.valid = False
        self._end(reason)

    def rehearsed(self, answers: Sequence[Answer]) -> None:
        """The answers to the prompts of `asked`, in order: the responses to this turn's calls are complete."""
        values = iter([self._read(answer) for answer in answers])
        self.asked = []
        self._book([next(values) if value is OPEN else value for value in self._given])

    def cannot_rehearse(self) -> None:
        """End an episode whose rehearsal has no room."""
        self._end("length")

    def trajectories(self, **fields: Any) -> list[Trajectory]:
        """The records of a finished episode: the actor's, then one for each rehearsal under a prompt of its own."""
        actor = self.trajectory(**fields)
        shared = {name: getattr(actor, name) for name in ("reward", "task_id", "finish", "valid")}
        return [actor] + [
            stream.finish(penalties={1: fine} if fine else {}, **shared, **fields) for stream, fine in self._sampled
        ]

    def trajectory(self, **fields: Any) -> Trajectory:
        """The actor's record of a finished episode; `fields` are `group`, `trajectory` and the like."""
        turns = len(self.task.user_turns)
        info = {
            "scores": list(self.scores),
            "satisfied": list(self.satisfied),
            "user_turns": turns,
            "parsed": self.parsed,
            "errors": list(self.errors),
        }
        return self.stream.finish(
            reward=episode_reward(self.scores, turns),
            penalties=dict(self._penalties),
            task_id=self.task.id,
            finish=self.finish,
            valid=self.valid,
            messages=tuple(self.messages),
            info=info,
            **fields,
        )

    # One generation of each role. Both return whether it was empty.

    def _take_act(self, tokens: np.ndarray, event: Event, counted: int) -> bool:
        turn = self.rules.chat.parse_turn(tokens)
        empty = not turn.content and counted == 0
        ended = len(tokens) and tokens[-1] == self.rules.grammar.control.im_end
        miscounted = turn.error is None and len(turn.calls) != counted
        if event == Event.MALFORMED or (ended and (turn.error is not None or miscounted)):
            self.errors.append(turn.error.code if turn.error else "CALLS_MISCOUNTED")
            self._say({"role": "assistant", "content": self.rules.chat.decode(tokens)}, failed=True)
            self._end("malformed")
        elif event == Event.REPLY:
            self.parsed += 1
            self._say(_message(turn, with_calls=False))
            self.replied = True
        elif not ended:
            self._say({"role": "assistant", "content": self.rules.chat.decode(tokens)})
            self._end("length")
        else:
            self.parsed += 1
            self._say(_message(turn, with_calls=True))
            self._calls, self._results, self._failed, self._given = len(turn.calls), [], False, []
            if event != Event.CALLS:
                self._end(FINISH_REASONS[event])
            else:
                self._respond(turn, tokens)
        return empty

    def _take_response(self, tokens: np.ndarray, event: Event) -> bool:
        ended = len(tokens) and tokens[-1] == self.rules.grammar.control.response_close
        body = self.rules.chat.decode(tokens[:-1] if ended or event == Event.MALFORMED else tokens)
        result = parse_rehearsal(body, form="inline")
        empty = result.error is not None and result.error.code == "EMPTY"
        self._results.append({"role": "tool", "content": body.strip()})
        if event == Event.MALFORMED or (ended and result.error is not None):
            self.errors.append(result.error.code if result.error else "UNEXPECTED_CONTROL")
            self._failed = True
            self._answered()
            self._end("malformed")
        elif not ended:
            self._answered()
            self._end("length")
        else:
            self.parsed += 1
            self._failed = self._failed or is_error_tool_call(result.value)
            self._go_on(event)
            if self._given:
                self._show_given()
        return empty

    def _respond(self, turn: Turn, tokens: np.ndarray) -> None:
        """What the world knows of the responses; what it leaves open is to be rehearsed."""
        simulator = self.rules.simulator
        if self.responder is None:
            self._given = [OPEN] * len(turn.calls)
        else:
            self._given = list(self.responder.answer(turn.calls, self.messages))
        if OPEN not in self._given:
            self._book(self._given)
        elif simulator is None:
            self._append(self._forced(Event.CALLS))
            self._show_given()
        else:
            raw = self.rules.chat.decode(tokens[:-1])
            self.asked = [
                simulator.messages(self.task, self.messages[:-1], raw, call)
                for call, value in zip(turn.calls, self._given, strict=True)
                if value is OPEN
            ]

    def _show_given(self) -> None:
        """In the actor's stream, after the header of a response: those that are given, up to the next open one."""
        while self.finish is None and len(self._results) < self._calls:
            value = self._given[len(self._results)]
            if value is OPEN:
                return
            text = json.dumps(value, ensure_ascii=False)
            self._results.append({"role": "tool", "content": text})
            tokens = response_tokens(self.rules.chat, text)
            length = self.length + len(tokens)
            if length >= self.rules.grammar.budgets.max_length:
                self._answered()
                return self._end("length")
            self.stream.context(tokens)
            self.context = np.concatenate([self.context, tokens])
            self.machine, event = self.rules.grammar.advance(self.machine, tokens[-1], length)
            self._failed = self._failed or is_error_tool_call(value)
            self._go_on(Event(int(event)))

    def _go_on(self, event: Event) -> None:
        """After a response in the actor's stream: the next response, the actor, or the end."""
        last = len(self._results) == self._calls
        if last:
            self._answered()
        if last and self._failed:
            self._end("error_tool_call")
        elif event in FINISH_REASONS:
            if not last:
                self._answered()
            self._end(FINISH_REASONS[event])
        else:
            self._append(self._forced(event))

    def _read(self, answer: Answer) -> Any:
        value, error = self.rules.simulator.read(answer.text)
        if error is None:
            self.parsed += 1
        else:
            self.errors.append(error)
        if answer.stream is not None:
            self._sampled.append((answer.stream, self.rules.empty_penalty if error == "EMPTY" else 0.0))
        self.rehearsals += 1
        return value

    def _book(self, values: Sequence[Any]) -> None:
        """Responses as context, and on to the actor's next turn."""
        chat, machine = self.rules.chat, self.machine
        texts = [json.dumps(value, ensure_ascii=False) for value in values]
        self._results = [{"role": "tool", "content": text} for text in texts]
        self._failed = any(is_error_tool_call(value) for value in values)
        self._answered()
        if self._failed:
            return self._end("error_tool_call")
        if machine.turns >= self.rules.grammar.budgets.max_turns:
            return self._end("turns")
        parts = [part for i, t in enumerate(texts) for part in (chat.response_header(i == 0), response_tokens(chat, t))]
        context = np.concatenate([*parts, chat.responses_done(self.rules.thinking)])
        if self.length + len(context) >= self.rules.grammar.budgets.max_length:
            return self._end("length")
        start = self.rules.grammar.start()
        self.machine = start._replace(generation=machine.generation, turns=machine.turns + 1)
        self._append(context)

    def _say(self, message: Mapping[str, Any], failed: bool = False) -> None:
        self.messages.append(message)
        self._steps.append(Step(message, (), failed))

    def _answered(self) -> None:
        """Book the results of the last message's calls."""
        self.messages += self._results
        self._steps[-1] = Step(self._steps[-1].message, tuple(self._results), self._failed)

    def _forced(self, event: Event) -> np.ndarray:
        return np.asarray(self.rules.grammar.forced_after(event), np.int32)

    def _append(self, context: np.ndarray) -> None:
        self.context = np.concatenate([self.context, context])
        self.stream.context(context)

    def _end(self, reason: str) -> None:
        self.finish, self.context, self.replied, self.asked = reason, _NOTHING, False, []


def _message(turn: Turn, with_calls: bool) -> dict[str, Any]:
    """A turn as a message of the public format: arguments are JSON text."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls and with_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in turn.calls
        ]
    return message
