"""The table of an inline episode, row by row, and that arrays follow it as scalars do."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.sampling import ACT, REHEARSE, Budgets, Event, Forced, Grammar, Machine

NAMES = ("think_open", "think_close", "im_start", "im_end", "endoftext")
NAMES += ("call_open", "call_close", "response_open", "response_close")
IDS = SimpleNamespace(**{name: 10 + i for i, name in enumerate(NAMES)})
WORD = 1
GRAMMAR = Grammar(IDS, Forced((21, 22, 23, 24), (22, 23), (25, 26, 27)), Budgets(12, 8, 3, 100))


def run(tokens, grammar=GRAMMAR, machine=None, length=10):
    """Feed tokens by name or id; the machine and the events."""
    machine = grammar.start() if machine is None else machine
    events = []
    for i, token in enumerate(tokens):
        machine, event = grammar.advance(machine, getattr(IDS, str(token), token), length + i + 1)
        events.append(Event(int(event)))
    return machine, events


CALL = ["call_open", WORD, "call_close"]


def test_a_reply_without_calls_hands_the_turn_to_the_host():
    machine, events = run(["think_open", WORD, "think_close", WORD, "im_end"])
    assert events == [Event.CONTINUE] * 4 + [Event.REPLY]
    assert machine.generation == 1 and machine.turns == 1


def test_two_calls_are_rehearsed_in_order_and_the_actor_goes_on():
    machine, events = run([*CALL, *CALL, "im_end"])
    assert events[-1] == Event.CALLS and GRAMMAR.forced_after(events[-1]) == (21, 22, 23, 24)
    assert (machine.role, machine.left, machine.generation, machine.spent) == (REHEARSE, 2, 2, 0)
    machine, events = run([WORD, "response_close"], machine=machine)
    assert events[-1] == Event.NEXT and GRAMMAR.forced_after(events[-1]) == (22, 23)
    assert (machine.role, machine.left, machine.generation) == (REHEARSE, 1, 3)
    machine, events = run([WORD, "response_close"], machine=machine)
    assert events[-1] == Event.DONE and GRAMMAR.forced_after(events[-1]) == (25, 26, 27)
    assert (machine.role, machine.calls, machine.generation, machine.turns) == (ACT, 0, 4, 2)


def test_a_call_inside_thinking_does_not_count():
    _, events = run(["think_open", *CALL, "think_close", "im_end"])
    assert events[-1] == Event.REPLY


def test_a_turn_that_ends_inside_thinking_is_a_reply():
    machine, events = run([*CALL, "think_open", "im_end"])
    assert events[-1] == Event.REPLY
    assert not GRAMMAR.next_turn(machine).thinking


@pytest.mark.parametrize("name", ["endoftext", "im_start", "response_open", "response_close"])
@pytest.mark.parametrize("before", [[], ["think_open"], CALL])
def test_an_actor_may_not_end_the_text_or_speak_for_the_world(name, before):
    assert run([*before, name])[1][-1] == Event.MALFORMED


@pytest.mark.parametrize("name", ["im_start", "im_end", "endoftext", "call_open", "call_close", "response_open"])
def test_a_rehearser_may_only_think_and_close(name):
    machine, _ = run([*CALL, "im_end"])
    assert run(["think_open", WORD, "think_close", WORD], machine=machine)[1] == [Event.CONTINUE] * 4
    assert run([WORD, name], machine=machine)[1][-1] == Event.MALFORMED


def test_a_response_closes_inside_thinking_too():
    machine, _ = run([*CALL, "im_end"])
    machine, events = run(["think_open", "response_close"], machine=machine)
    assert events[-1] == Event.DONE and not machine.thinking


def test_the_last_allowed_token_may_end_its_generation():
    assert run([WORD] * 12)[1][-2:] == [Event.CONTINUE, Event.LENGTH]
    assert run([WORD] * 11 + ["im_end"])[1][-1] == Event.REPLY
    machine, _ = run([*CALL, "im_end"])
    assert run([WORD] * 8, machine=machine)[1][-2:] == [Event.CONTINUE, Event.LENGTH]
    assert run([WORD] * 7 + ["response_close"], machine=machine)[1][-1] == Event.DONE


def test_the_episode_ends_where_the_next_header_and_a_token_do_not_fit():
    assert run([WORD], length=98)[1] == [Event.CONTINUE]
    assert run([WORD], length=99)[1] == [Event.LENGTH]
    assert run([*CALL, "im_end"], length=91)[1][-1] == Event.CALLS  # 95 and 4 forced: one is left
    assert run([*CALL, "im_end"], length=92)[1][-1] == Event.LENGTH
    assert run(["im_end"], length=99)[1] == [Event.REPLY]


def test_no_turn_begins_beyond_the_last():
    machine, _ = run([*CALL, "im_end"])
    machine = machine._replace(turns=np.int32(3))
    assert run(["response_close"], machine=machine)[1] == [Event.TURNS]
    assert GRAMMAR.turn_fits(machine, 10, 5) == Event.TURNS
    assert GRAMMAR.turn_fits(GRAMMAR.start(), 90, 9) == Event.CONTINUE
    assert GRAMMAR.turn_fits(GRAMMAR.start(), 90, 10) == Event.LENGTH


def test_stop_ids_are_the_ids_that_end_a_generation():
    for role in (ACT, REHEARSE):
        machine = GRAMMAR.start() if role == ACT else run([*CALL, "im_end"])[0]
        ends = {getattr(IDS, n) for n in NAMES if run([n], machine=machine)[1] != [Event.CONTINUE]}
        assert set(GRAMMAR.stop_ids(role)) == ends


def random_tokens(seed: int, count: int) -> np.ndarray:
    weights = np.array([6.0] + [1.0] * 9)
    return np.random.default_rng(seed).choice([WORD, *range(10, 19)], count, p=weights / weights.sum())


def test_arrays_follow_the_table_as_scalars_do():
    rows, machines = 500, []
    rng = np.random.default_rng(0)
    for _ in range(rows):
        role, thinking = rng.integers(1, 3), rng.random() < 0.3
        calls, spent, turns = rng.integers(0, 3), rng.integers(0, 12), rng.integers(1, 4)
        machines.append(Machine(role, np.bool_(thinking), calls, rng.integers(1, 3), rng.integers(1, 9), spent, turns))
    tokens, lengths = random_tokens(1, rows), rng.integers(80, 101, rows)
    stacked = Machine(*(jnp.asarray(np.array(column)) for column in zip(*machines, strict=True)))
    after, events = GRAMMAR.advance(stacked, jnp.asarray(tokens), jnp.asarray(lengths), jnp)
    for i in range(rows):
        expected, event = GRAMMAR.advance(machines[i], tokens[i], lengths[i])
        assert int(events[i]) == int(event)
        assert [int(x[i]) for x in after] == [int(x) for x in expected]
    assert len(set(np.asarray(events).tolist())) == len(Event)


@pytest.mark.parametrize("seed", range(30))
def test_replay_is_advance_token_by_token(seed):
    tokens = random_tokens(seed, 14)
    tokens[: seed // 3] = WORD  # long runs without a control id, up to and over the budget
    length = [10, 90][seed % 2]
    machine, events = GRAMMAR.start(), []
    for i, token in enumerate(tokens):
        machine, event = GRAMMAR.advance(machine, token, length + i + 1)
        events.append(int(event))
        if event != Event.CONTINUE:
            break
    replayed, event, count = GRAMMAR.replay(GRAMMAR.start(), tokens, length)
    assert (int(event), count) == (events[-1], len(events))
    assert [int(x) for x in replayed] == [int(x) for x in machine]
