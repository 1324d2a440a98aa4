"""The fused loop yields the episodes that a plain host-driven loop yields, token for token."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.grpo import token_logps
from envace_jax.sampling import (
    FINISH_REASONS,
    Budgets,
    Engine,
    Event,
    Forced,
    FusedLoop,
    Grammar,
    SamplingParams,
    Status,
    sequence_key,
)

from .conftest import CONFIG, prompt

VOCAB = 12  # few ids are ever sampled, so control ids are common; some that end an episode badly cannot occur
IDS = SimpleNamespace(
    think_open=5,
    think_close=8,
    im_start=901,
    im_end=9,
    endoftext=902,
    call_open=10,
    call_close=903,
    response_open=904,
    response_close=1,
)
FORCED = Forced(first=(50, 51, 52), between=(51, 52), done=(53, 54, 55, 56))
GRAMMAR = Grammar(IDS, FORCED, Budgets(turn_tokens=14, response_tokens=12, max_turns=5, max_length=140))
PARAMS = SamplingParams(temperature=1.0)
USER_TURNS = 2  # messages after the prompt
EPISODES = range(8, 28)


def first_prompt(episode: int) -> np.ndarray:
    return prompt(5 + 7 * (episode // 2 % 14))  # groups of two share one


def message(episode: int, turn: int) -> np.ndarray:
    return prompt(4 + turn, seed=episode)


def key(episode: int) -> np.ndarray:
    return sequence_key(3, 1, episode)


def hosted_episode(engine, model, episode: int, rehearser=None):
    """One episode by `decode` and `extend`, in slot 0: tokens, roles, generations, logps and why it ended.

    With a rehearser, whoever speaks next is prefilled with all that was said.
    """
    tokens, roles, generations, logps = [], [], [], []

    def record(new, role=0, generation=0, new_logps=None):
        tokens.extend(np.asarray(new).tolist())
        roles.extend([role] * len(new))
        generations.extend([generation] * len(new))
        logps.extend([0.0] * len(new) if new_logps is None else new_logps.tolist())

    context = first_prompt(episode)
    state = engine.prefill(model, engine.start(), {0: context}, {0: key(episode)})
    record(context)
    machine, turn = GRAMMAR.start(), 0
    while True:
        role, generation = int(machine.role), int(machine.generation)
        params = SamplingParams(temperature=PARAMS.temperature, stop_ids=GRAMMAR.stop_ids(role))
        speaker = model
        if rehearser is not None:
            speaker = (model, rehearser)[role - 1]
            state = engine.prefill(speaker, state, {0: np.asarray(tokens, np.int32)}, {0: key(episode)})
        state, out = engine.decode(speaker, state, {0: GRAMMAR.allowance(machine, len(tokens))}, params)
        machine, event, used = GRAMMAR.replay(machine, out[0].tokens, len(tokens))
        assert used == len(out[0].tokens)
        record(out[0].tokens, role, generation, out[0].logps)
        if event == Event.REPLY:
            if turn == USER_TURNS:
                return tokens, roles, generations, logps, "replied"
            context = message(episode, turn)
            fits = GRAMMAR.turn_fits(machine, len(tokens), len(context))
            if fits != Event.CONTINUE:
                return tokens, roles, generations, logps, FINISH_REASONS[fits]
            turn += 1
            machine = GRAMMAR.next_turn(machine)
        elif event in FINISH_REASONS:
            return tokens, roles, generations, logps, FINISH_REASONS[event]
        else:
            context = np.array(GRAMMAR.forced_after(event), np.int32)
        if rehearser is None:
            state = engine.extend(model, state, {0: context})
        record(context)


def fused_episodes(engine, model, steps: int = 16, episodes=EPISODES, loop=None, rehearser=None):
    """The episodes through the fused loop, slots refilled as they end: {episode: (parts, reason)}."""
    loop = loop or FusedLoop(engine, GRAMMAR, PARAMS, look_every=16)
    state = loop.start(split=rehearser is not None)
    waiting, owner, turns, parts, results = list(episodes), {}, {}, {}, {}
    while waiting or owner:
        free = [s for s in range(engine.slots) if s not in owner]
        fresh = {s: waiting.pop(0) for s in free[: len(waiting)]}
        if fresh:
            prompts = {s: first_prompt(e) for s, e in fresh.items()}
            state = loop.begin(model, state, prompts, {s: key(e) for s, e in fresh.items()}, rehearser=rehearser)
        owner.update(fresh)
        for e in fresh.values():
            turns[e], parts[e] = 0, []
        state, report = loop.run(model, state, steps=steps, enough=2, rehearser=rehearser)
        over, messages = {}, {}
        for slot, e in owner.items():
            parts[e].append(loop.harvest(slot))
            status = Status(int(report.status[slot]))
            if status == Status.REPLIED:
                m = message(e, turns[e])
                fits = GRAMMAR.turn_fits(report.episode(slot), int(report.lengths[slot]), len(m))
                if turns[e] == USER_TURNS:
                    over[slot] = "replied"
                elif fits != Event.CONTINUE:
                    over[slot] = FINISH_REASONS[fits]
                else:
                    messages[slot] = m
                    turns[e] += 1
            elif status != Status.RUNNING:
                over[slot] = status.name.lower()
        if messages:
            state = loop.next_turn(model, state, messages, rehearser=rehearser)
        if over:
            state = loop.end(state, list(over))
        for slot, reason in over.items():
            e = owner.pop(slot)
            results[e] = [np.concatenate(column) for column in zip(*parts[e], strict=True)], reason
    return results


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, slots=4, max_length=160, vocab_size=VOCAB, decode_chunk=24, prefill_chunk=32, min_window=80)


@pytest.fixture(scope="module")
def episodes(engine, model):
    return fused_episodes(engine, model, steps=16)


def test_fused_episodes_are_the_hosted_ones(engine, model, episodes):
    for e in EPISODES:
        tokens, roles, generations, logps, reason = hosted_episode(engine, model, e)
        got, got_reason = episodes[e]
        assert got[0].tolist() == tokens
        assert got[1].tolist() == roles
        assert got[2].tolist() == generations
        np.testing.assert_allclose(got[3], logps, atol=1e-4)
        assert got_reason == reason


def test_each_role_speaks_by_its_own_parameters(engine, model, other_model):
    fused = fused_episodes(engine, model, rehearser=other_model)
    for e in EPISODES:
        tokens, roles, generations, logps, reason = hosted_episode(engine, model, e, rehearser=other_model)
        got, got_reason = fused[e]
        assert got[0].tolist() == tokens
        assert got[1].tolist() == roles
        assert got[2].tolist() == generations
        np.testing.assert_allclose(got[3], logps, atol=1e-4)
        assert got_reason == reason
    assert sum((parts[1] == 2).sum() for parts, _ in fused.values()) > 20


def test_random_episodes_compile_the_programs_of_the_buckets_and_no_other(model):
    ahead = Engine(CONFIG, slots=4, max_length=160, vocab_size=VOCAB, min_window=80, compile_ahead=True)
    loop = FusedLoop(ahead, GRAMMAR, PARAMS, look_every=16)
    assert ahead.shapes.windows == (80, 120, 160)
    fused_episodes(ahead, model, episodes=range(100, 105), loop=loop)
    before = ahead.compilations
    assert len(fused_episodes(ahead, model, episodes=range(200, 450), loop=loop)) == 250
    assert ahead.compilations == before
    # Of the loop: 4 rows in three windows, 2 and 1 in the last; and one that sets slots.
    assert loop._run._cache_size() == 3 + 1 + 1 and loop._set._cache_size() == 1


def test_the_hosts_looks_do_not_change_an_episode(engine, model, episodes):
    for e, (columns, reason) in fused_episodes(engine, model, steps=5).items():
        assert columns[0].tolist() == episodes[e][0][0].tolist()
        assert reason == episodes[e][1]


def test_recorded_logps_are_the_trainers(model, episodes):
    tokens, roles, _, logps, kept = episodes[8][0]
    expected = token_logps(model, jnp.asarray(tokens[None]), temperature=PARAMS.temperature, vocab_size=VOCAB)[0]
    np.testing.assert_allclose(logps, np.where(roles > 0, expected, 0), atol=1e-4)
    np.testing.assert_array_equal(kept, 0)


def test_the_compared_episodes_cover_the_grammar(episodes):
    assert {reason for _, reason in episodes.values()} == {"malformed", "length", "replied"}
    forced = set()
    for (_, roles, generations, logps, _), _ in episodes.values():
        context = roles == 0
        assert (generations[context] == 0).all() and (logps[context] == 0).all() and (generations[~context] > 0).all()
        ends = np.flatnonzero(np.diff(context.astype(int), append=0))
        for begin, end in zip(ends, ends[1:], strict=False):
            if context[end] and end + 1 < len(roles):
                forced.add((int(roles[begin]), end - begin, int(roles[end + 1])))
    act, rehearse = 1, 2
    assert {(act, 3, rehearse), (rehearse, 2, rehearse), (rehearse, 4, act), (act, 4, act)} <= forced


def test_a_parked_slot_stands_still_while_others_run(engine, model):
    loop = FusedLoop(engine, GRAMMAR, PARAMS, look_every=16)
    state = loop.begin(model, loop.start(), {s: first_prompt(s) for s in range(4)}, {s: key(s) for s in range(4)})
    for _ in range(40):
        state, report = loop.run(model, state)
        if report.slots(Status.REPLIED) and report.slots(Status.RUNNING):
            break
    (slot, *_) = report.slots(Status.REPLIED)
    length = report.lengths[slot]
    loop.harvest(slot)
    state, report = loop.run(model, state)
    assert report.lengths[slot] == length and len(loop.harvest(slot).tokens) == 0


def test_the_host_may_cut_a_running_episode_and_reuse_its_slot(engine, model, episodes):
    loop = FusedLoop(engine, GRAMMAR, PARAMS, look_every=16)
    state = loop.begin(model, loop.start(), {1: first_prompt(19)}, {1: key(19)})
    state, report = loop.run(model, state, steps=3)
    assert report.status[1] == Status.RUNNING
    state = loop.end(state, [1])
    assert loop.report(state).status[1] == Status.IDLE
    np.testing.assert_array_equal(loop.harvest(1).tokens, episodes[19][0][0][: len(first_prompt(19)) + 3])
    state = loop.begin(model, state, {1: first_prompt(8)}, {1: key(8)})
    state, _ = loop.run(model, state)
    got = loop.harvest(1)
    np.testing.assert_array_equal(got.tokens, episodes[8][0][0][: len(got.tokens)])


def test_misuse_is_named(engine, model):
    long = Grammar(IDS, FORCED, Budgets(8, 8, 5, 161))
    with pytest.raises(ValueError, match="episodes of 161 tokens.*max_length=160"):
        FusedLoop(engine, long, PARAMS)
    loop = FusedLoop(engine, GRAMMAR, PARAMS, look_every=16)
    state = loop.start()
    with pytest.raises(ValueError, match="slot 0 has 140 tokens"):
        loop.begin(model, state, {0: prompt(140)}, {0: key(0)})
    with pytest.raises(ValueError, match="slot 0 is IDLE"):
        loop.next_turn(model, state, {0: prompt(4)})
    with pytest.raises(ValueError, match="look_every=16"):
        loop.run(model, state, steps=17)
