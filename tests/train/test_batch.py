"""Advantages reach the tokens they belong to, and the figures of a step are those of its valid episodes."""

import dataclasses

import numpy as np
import pytest

from envace_jax.config import AdvantageConfig, TrainConfig
from envace_jax.rollout.trajectory import ACT, REHEARSE, TokenStream
from envace_jax.train.batch import assign_advantages, episode_metrics, make_batch


def episode(reward, *roles, group=0, trajectory=0, **fields):
    """Two tokens of context, then two tokens for each role."""
    stream = TokenStream()
    stream.context(np.array([7, 7]))
    for i, role in enumerate(roles):
        stream.generation(role, np.array([i, i]))
    return stream.finish(reward=reward, group=group, trajectory=trajectory, **fields)


def test_each_role_is_compared_with_its_own_in_the_group_and_each_trajectory_counts_once():
    trajectories = [
        episode(1.0, ACT, REHEARSE, ACT, trajectory=0),
        episode(0.0, ACT, trajectory=1),
        episode(0.5, ACT, trajectory=0, group=1),
    ]
    # Acts: mean of 1 and 0. Rehearsals: one trajectory only, so nothing to compare with. Group 1: likewise.
    assert assign_advantages(trajectories, AdvantageConfig()) == [{1: 0.5, 2: 0.0, 3: 0.5}, {1: -0.5}, {1: 0.0}]


def test_a_penalty_is_that_generations_alone():
    trajectories = [episode(1.0, ACT, ACT, trajectory=0, penalties={2: 0.5}), episode(1.0, ACT, trajectory=1)]
    # Values of the trajectories: (1 + 0.5) / 2 and 1; their mean is 0.875.
    assert assign_advantages(trajectories, AdvantageConfig()) == [{1: 0.125, 2: -0.375}, {1: 0.125}]


def test_an_invalid_trajectory_neither_learns_nor_counts():
    lost = episode(float("nan"), ACT, trajectory=2, valid=False)
    trajectories = [episode(1.0, ACT, trajectory=0), episode(0.0, ACT, trajectory=1), lost]
    advantages = assign_advantages(trajectories, AdvantageConfig())
    assert advantages == [{1: 0.5}, {1: -0.5}, {1: 0.0}]
    batch, trained = make_batch(trajectories, advantages, 4, TrainConfig())
    assert batch.tokens.shape == (2, 4) and trained.all()
    assert sorted(batch.advantages[:, 2]) == [-0.5, 0.5]


def test_a_frozen_roles_tokens_stay_in_view_as_context():
    trajectories = [episode(1.0, ACT, REHEARSE, trajectory=0), episode(0.0, REHEARSE, trajectory=1)]
    advantages = assign_advantages(trajectories, AdvantageConfig())
    batch, trained = make_batch(trajectories, advantages, 6, TrainConfig(rehearse=False))
    assert batch.roles.tolist() == [[0, 0, ACT, ACT, 0, 0], [0] * 6]
    assert batch.tokens[0].tolist() == [7, 7, 0, 0, 1, 1] and trained.tolist() == [True, False]


def test_figures_are_of_valid_episodes_and_tokens_of_all_that_was_sampled():
    trajectories = [
        episode(1.0, ACT, REHEARSE, trajectory=0),
        episode(0.0, ACT, trajectory=1, finish="malformed"),
        episode(0.5, ACT, trajectory=0, group=1),
        episode(float("nan"), ACT, trajectory=1, group=1, valid=False, finish="judge_failed"),
    ]
    metrics = episode_metrics(trajectories)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == pytest.approx(np.std([1, 0, 0.5]))
    assert metrics["reward/full_fraction"] == pytest.approx(1 / 3)
    assert (metrics["episodes/valid_fraction"], metrics["episodes/mixed_groups"]) == (0.75, 0.5)
    assert (metrics["tokens/act"], metrics["tokens/rehearse"]) == (8.0, 2.0)
    assert (metrics["finish/done"], metrics["finish/malformed"], metrics["finish/judge_failed"]) == (0.5, 0.25, 0.25)


def test_an_episode_of_several_sequences_is_one_episode():
    actor = episode(1.0, ACT, trajectory=0)
    rehearsals = [dataclasses.replace(episode(1.0, REHEARSE), trajectory=0) for _ in range(3)]
    metrics = episode_metrics([actor, *rehearsals, episode(0.0, ACT, trajectory=1)])
    assert metrics["episodes/count"] == 2.0 and metrics["reward/mean"] == 0.5 and metrics["tokens/rehearse"] == 6.0


def test_no_episodes_at_all_are_figures_too():
    metrics = episode_metrics([])
    assert metrics["episodes/valid_fraction"] == 0.0 and np.isnan(metrics["reward/mean"])
