"""Groups without signal are replaced, long episodes are fined or left out, and rows are dealt to shards evenly."""

import dataclasses

import numpy as np
import pytest

from envace_jax.config import RewardConfig, TrainConfig
from envace_jax.rollout.trajectory import ACT, TokenStream
from envace_jax.train.batch import make_batch
from envace_jax.train.packing import balance_rows
from envace_jax.train.selection import FIRST_REFILL, sample_with_signal, shape_rewards
from envace_jax.train.state import data_shards, place_batch
from models.qwen3.sharding import make_mesh


def episode(reward, length=4, **fields):
    stream = TokenStream()
    stream.context(np.zeros(1, np.int32))
    stream.generation(ACT, np.full(length - 1, length, np.int32))
    return stream.finish(reward=reward, **fields)


def group(*rewards):
    return lambda number: [episode(r, group=number, trajectory=i + 10 * number) for i, r in enumerate(rewards)]


FLAT, MIXED = group(1.0, 1.0), group(1.0, 0.0)


def sample(made, wanted, refills):
    """made: step -> the groups of that step. Returns all episodes, those learned from, and the steps asked for."""
    asked = []

    def episodes(step):
        asked.append(step)
        return [t for number, make in enumerate(made[len(asked) - 1]) for t in make(number)]

    return *sample_with_signal(episodes, 3, groups=wanted, max_refills=refills, shape=list), asked


def test_groups_with_equal_rewards_are_replaced_until_there_are_enough():
    everything, learned, asked = sample([(FLAT, MIXED), (FLAT, FLAT), (MIXED, MIXED)], wanted=2, refills=5)
    assert len(everything) == 12 and len(learned) == 4
    assert asked == [3, FIRST_REFILL + 15, FIRST_REFILL + 16]
    assert len({(t.group, t.trajectory) for t in everything}) == 12, "a refill has numbers of its own"
    assert [t.group for t in learned] == [1, 1, 4, 4]


def test_refills_are_limited():
    everything, learned, asked = sample([(FLAT,), (FLAT,), (FLAT,)], wanted=1, refills=2)
    assert len(asked) == 3 and len(everything) == 6 and learned == []


def test_without_refills_all_groups_stay():
    everything, learned, asked = sample([(FLAT, MIXED)], wanted=2, refills=0)
    assert len(everything) == len(learned) == 4 and asked == [3]


def test_long_episodes_lose_up_to_one_over_the_last_tokens():
    episodes = [episode(1.0, n, trajectory=n) for n in (60, 80, 90, 100)]
    shaped = shape_rewards(episodes, RewardConfig(overlong="shape", overlong_buffer=20), 100)
    assert [t.reward for t in shaped] == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_a_rehearsal_is_fined_as_its_actor_is():
    actor, rehearsal = episode(1.0, 90, trajectory=7), episode(1.0, 100, trajectory=7)
    shaped = shape_rewards([actor, rehearsal], RewardConfig(overlong="shape", overlong_buffer=20), 100)
    assert [t.reward for t in shaped] == pytest.approx([0.5, 0.5])


def test_masked_episodes_are_those_that_a_budget_cut():
    episodes = [episode(1.0, finish="done"), episode(1.0, finish="length"), episode(1.0, finish="done", valid=False)]
    assert [t.valid for t in shape_rewards(episodes, RewardConfig(overlong="mask"), 4)] == [True, False, False]
    assert [t.valid for t in shape_rewards(episodes, RewardConfig(), 4)] == [True, True, False]


def test_data_shards_get_as_many_tokens_and_no_row_is_lost():
    lengths = [32, 5, 30, 7, 28, 9, 26, 11]
    episodes = [episode(1.0, n, trajectory=n) for n in lengths]
    batch, trained = make_batch(episodes, [{1: 1.0}] * 8, 32, TrainConfig())
    rows = batch.tokens.shape[0]
    balanced, flags = balance_rows(batch, trained, shards=2, micro_batch=2)
    filled = (balanced.segments > 0).sum(axis=1)
    assert sorted(filled[filled > 0]) == sorted((batch.segments > 0).sum(axis=1))
    assert len(filled) == -(-rows // 4) * 4 and flags.sum() == rows
    first = filled[:4].reshape(2, 2).sum(axis=1)
    assert abs(first[0] - first[1]) <= max(lengths) - min(lengths)
    for name in ("tokens", "advantages", "roles"):
        one, other = getattr(batch, name), getattr(balanced, name)
        assert sorted(map(tuple, one.tolist())) == sorted(map(tuple, other[filled > 0].tolist()))


def test_on_eight_devices_each_has_as_many_tokens_to_attend_to():
    lengths = range(34, 66, 2)  # so long that each has a row of its own
    episodes = [episode(1.0, n, trajectory=n) for n in lengths]
    batch, trained = make_batch(episodes, [{1: 1.0}] * 16, 64, TrainConfig())
    mesh = make_mesh(4, 2, 1)

    def tokens(batch):
        placed, used = place_batch(batch, 2, mesh)
        assert placed.segments.shape == (1, 16, 64) and used == 1
        return [int((np.asarray(shard.data) > 0).sum()) for shard in placed.segments.addressable_shards]

    assert len(set(tokens(batch))) == 8
    balanced, _ = balance_rows(batch, trained, data_shards(mesh), micro_batch=2)
    assert tokens(balanced) == [sum(lengths) // 8] * 8


def test_rows_without_anything_to_train_come_last():
    episodes = [episode(1.0, 8, trajectory=i) for i in range(3)]
    batch, _ = make_batch(episodes, [{1: 1.0}] * 3, 8, TrainConfig())
    batch = dataclasses.replace(batch, tokens=np.arange(3)[:, None] + np.zeros((1, 8), int))
    balanced, flags = balance_rows(batch, np.array([False, True, True]), shards=1, micro_batch=2)
    assert flags.tolist() == [True, True, False] and balanced.tokens[:, 0].tolist() == [1, 2, 0]
