"""Hosted and fused rollouts of a policy that draws each token by the one before: the same episodes, whatever the slots
and the chunks, and every way an episode can end among them."""

import dataclasses
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer
from envace_jax.rewards import RuleJudge
from envace_jax.rollout import ACT, REHEARSE, MixedWorld, RealWorld, run_episodes
from envace_jax.sampling import Engine

from .bigram import Bigram
from .conftest import SETTINGS, make_task

SAMPLED = dataclasses.replace(
    SETTINGS, group_size=8, turn_tokens=11, response_tokens=6, max_length=150, max_turns=4, look_every=16
)
CALL = '{"name": "get_order", "arguments": {"order": 111}}'
RESPONSES = ('{"a": 1}', '{"error_tool_call": {}}', "no order")
REPLY = "Done 0."
LINES = (CALL, *RESPONSES, REPLY, "{broken", "\n\n")


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> ChatTokenizer:
    """A tokenizer to which each of LINES is a single token."""
    directory = tmp_path_factory.mktemp("lines")
    train_tokenizer([*LINES] * 50, 600, directory, pattern=r"[^\n]+|\n+")
    return ChatTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def policy(lines) -> Bigram:
    size = lines.vocab_size
    control = lines.control

    def id_of(text: str) -> int:
        (token,) = lines.encode_text(text)
        return int(token)

    table = np.full((size, size), -30.0, np.float32)

    def follows(before: int, **shares: float) -> None:
        names = dict(
            zip(("call", "ok", "rejected", "text", "reply", "broken", "blank"), map(id_of, LINES), strict=True)
        )
        for name, share in shares.items():
            table[before, names[name] if name in names else getattr(control, name)] = np.log(share)

    follows(id_of("\n\n"), call_open=0.6, reply=0.3, think_open=0.1)  # the actor begins
    follows(control.call_open, call=0.95, broken=0.05)
    follows(id_of(CALL), call_close=1.0)
    follows(id_of("{broken"), call_close=1.0)
    follows(control.call_close, im_end=0.7, call_open=0.3)
    follows(control.think_open, reply=0.8, call_open=0.2)
    follows(control.think_close, call_open=0.5, reply=0.5)
    follows(id_of(REPLY), im_end=0.8, think_close=0.1, endoftext=0.1)
    follows(id_of("\n"), ok=0.85, rejected=0.1, text=0.05)  # the rehearser begins
    follows(id_of(RESPONSES[0]), response_close=0.97, ok=0.03)
    follows(id_of(RESPONSES[1]), response_close=1.0)
    follows(id_of(RESPONSES[2]), response_close=0.5, im_end=0.5)
    return Bigram(table)


@pytest.fixture(scope="module")
def engine(policy) -> Engine:
    return Engine(policy.config, slots=8, max_length=150, decode_chunk=16, min_window=150, compact=False)


@pytest.fixture(scope="module")
def sample(policy, engine, lines):
    def run(**arguments):
        settings = dataclasses.replace(SAMPLED, **arguments.pop("settings", {}))
        tasks = [make_task(1), make_task(2), make_task(3)]
        return run_episodes(engine, policy, lines, tasks, settings=settings, seed=7, **arguments)

    return run


@pytest.fixture(scope="module")
def hosted(sample):
    return sample(settings={"engine": "hosted"})


def same(a, b) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert left.tokens.tolist() == right.tokens.tolist()
        assert left.roles.tolist() == right.roles.tolist()
        assert left.generations.tolist() == right.generations.tolist()
        np.testing.assert_allclose(left.behavior_logps, right.behavior_logps, rtol=0, atol=1e-5)
        assert (left.finish, left.reward, left.penalties) == (right.finish, right.reward, right.penalties)
        assert left.messages == right.messages


def test_every_way_to_end_is_among_the_sampled_episodes(hosted):
    ends = Counter(t.finish for t in hosted)
    assert set(ends) >= {"done", "malformed", "error_tool_call", "turns"}
    assert any(len(t.generation_roles()) > 4 for t in hosted)


def test_fused_gives_the_episodes_of_hosted(hosted, sample):
    same(sample(settings={"engine": "fused"}), hosted)


def test_how_often_the_host_looks_changes_nothing(hosted, sample):
    same(sample(settings={"engine": "hosted", "look_every": 5}), hosted)


def test_verdicts_that_come_late_and_out_of_order_change_nothing(hosted, sample):
    class Slow(RuleJudge):
        def answer(self, questions):
            time.sleep(0.02 * (len(questions[0].history) % 3))
            return super().answer(questions)

    with ThreadPoolExecutor(3) as pool:
        for path in ("hosted", "fused"):
            same(sample(settings={"engine": path}, judge=Slow(), judge_pool=pool), hosted)


@pytest.mark.parametrize("path", ["hosted", "fused"])
def test_others_are_sampled_while_a_verdict_is_waited_for(sample, hosted, path):
    later = threading.Event()

    class Late(RuleJudge):
        asked = 0

        def answer(self, questions):
            self.asked += 1
            if self.asked > 1:
                later.set()
            assert later.wait(60), "no other episode came to its verdict meanwhile"
            return super().answer(questions)

    with ThreadPoolExecutor(2) as pool:
        same(sample(settings={"engine": path}, judge=Late(), judge_pool=pool), hosted)


def test_an_episode_depends_on_its_number_not_on_the_call(hosted, policy, engine, lines):
    settings = dataclasses.replace(SAMPLED, engine="hosted")
    later = run_episodes(
        engine, policy, lines, [make_task(2)], settings=settings, seed=7, first_episode=8, first_group=1
    )
    same(later, hosted[8:16])
    assert [(t.group, t.trajectory) for t in later] == [(t.group, t.trajectory) for t in hosted[8:16]]


def test_another_step_or_seed_draws_other_episodes(hosted, sample):
    other = sample(settings={"engine": "hosted"}, step=1)
    assert [t.tokens.tolist() for t in other] != [t.tokens.tolist() for t in hosted]


def test_behaviour_log_probabilities_are_those_of_the_policy(hosted, policy):
    table = np.asarray(policy.table[...], np.float64)
    logps = table - np.log(np.exp(table).sum(-1, keepdims=True))
    for t in hosted:
        at = np.flatnonzero(t.roles)
        np.testing.assert_allclose(t.behavior_logps[at], logps[t.tokens[at - 1], t.tokens[at]], rtol=0, atol=1e-4)


def test_mixed_worlds_rehearse_some_responses_and_execute_every_call(sample):
    world = RealWorld()
    mixed = sample(world=MixedWorld(world, 0.5))
    assert sorted(world.started) == list(range(24))
    results = [m["content"] for t in mixed for m in t.messages if m["role"] == "tool"]
    real = sum('"lamp"' in result for result in results)
    rehearsed = sum(role == REHEARSE for t in mixed for role in t.generation_roles().values())
    assert real + rehearsed == len(results) and min(real, rehearsed) > len(results) / 4
    same(sample(world=MixedWorld(RealWorld(), 0.5), settings={"look_every": 5}), mixed)


def test_a_rehearser_of_the_same_parameters_changes_nothing(hosted, sample, policy):
    same(sample(rehearser=Bigram(policy.table[...])), hosted)


def test_each_role_is_sampled_by_its_own_parameters(sample, policy):
    flat = np.asarray(policy.table[...]) * 0.5
    tables = {ACT: np.asarray(policy.table[...], np.float64), REHEARSE: flat.astype(np.float64)}
    episodes = sample(rehearser=Bigram(flat))
    for role, table in tables.items():
        logps = table - np.log(np.exp(table).sum(-1, keepdims=True))
        for t in episodes:
            at = np.flatnonzero(t.roles == role)
            np.testing.assert_allclose(t.behavior_logps[at], logps[t.tokens[at - 1], t.tokens[at]], rtol=0, atol=1e-4)


def test_fused_gives_the_episodes_of_hosted_where_roles_have_their_own_parameters(sample, policy):
    rehearser = Bigram(np.asarray(policy.table[...]) * 0.5)
    hosted = sample(rehearser=rehearser)
    assert any(REHEARSE in t.roles for t in hosted)
    same(sample(settings={"engine": "fused"}, rehearser=rehearser), hosted)


def test_members_of_a_group_may_be_sampled_at_temperatures_of_their_own(sample, hosted):
    heats = [1.0, 0.0] * 4
    mixed = sample(temperature=heats)
    same(mixed[::2], hosted[::2])
    greedy = {tuple(t.tokens[t.roles > 0].tolist()) for t in mixed[1:8:2]}
    assert len(greedy) == 1
    with pytest.raises(ValueError, match="2 temperatures for groups of 8"):
        sample(temperature=[1.0, 0.0])


def test_an_engine_that_is_too_short_is_refused(sample):
    with pytest.raises(ValueError, match="max_length=151"):
        sample(settings={"max_length": 151})
