"""Who is compared with whom, and how."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.grpo import ACT, REHEARSE, groups_with_signal, overlong_mask, overlong_penalty, role_advantages

SETTINGS = [
    dict(baseline=baseline, by_role=by_role, scale_by_std=std, leave_one_out=loo)
    for baseline in ("trajectory", "generation")
    for by_role in (True, False)
    for std in (False, True)
    for loo in (False, True)
]


def test_a_trajectory_counts_once_however_many_generations_it_has():
    rewards, trajectory = [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]
    by_trajectory = role_advantages(rewards, [0] * 4, trajectory, [ACT] * 4)
    by_generation = role_advantages(rewards, [0] * 4, trajectory, [ACT] * 4, baseline="generation")
    np.testing.assert_array_equal(by_trajectory, np.float32([0.5, 0.5, 0.5, -0.5]))
    np.testing.assert_array_equal(by_generation, np.float32([0.25, 0.25, 0.25, -0.75]))
    assert by_trajectory.dtype == np.float32


def test_the_value_of_a_trajectory_is_the_mean_reward_of_its_generations():
    # values 0.9 and 0.5, mean 0.7
    advantages = role_advantages([1.0, 0.8, 0.5], [0] * 3, [0, 0, 1], [ACT] * 3)
    np.testing.assert_allclose(advantages, [0.3, 0.1, -0.2], atol=1e-7)


def test_roles_have_their_own_baselines_unless_told_otherwise():
    rewards, trajectory, role = [1.0, 0.0, 0.5, 0.1], [0, 1, 0, 1], [ACT, ACT, REHEARSE, REHEARSE]
    np.testing.assert_allclose(role_advantages(rewards, [3] * 4, trajectory, role), [0.5, -0.5, 0.2, -0.2], atol=1e-7)
    # together: values 0.75 and 0.05, mean 0.4
    np.testing.assert_allclose(
        role_advantages(rewards, [3] * 4, trajectory, role, by_role=False), [0.6, -0.4, 0.1, -0.3], atol=1e-7
    )


def test_a_cell_of_one_has_no_signal_per_trajectory_and_its_raw_reward_per_generation():
    for extra in ({}, {"scale_by_std": True}, {"leave_one_out": True}):
        np.testing.assert_array_equal(role_advantages([0.7], [0], [0], [ACT], **extra), [0.0])
        raw = role_advantages([0.7], [0], [0], [ACT], baseline="generation", **extra)
        np.testing.assert_allclose(raw, [0.7], atol=1e-5)
    # one trajectory of two generations is one sample per trajectory, two per generation
    np.testing.assert_array_equal(role_advantages([1.0, 0.9], [0, 0], [5, 5], [ACT, ACT]), [0.0, 0.0])


def test_an_invalid_row_moves_nobodys_baseline_and_may_have_no_reward():
    rewards, valid = [1.0, 0.0, np.nan, 100.0], [True, True, False, False]
    for baseline in ("trajectory", "generation"):
        advantages = role_advantages(rewards, [0] * 4, [0, 1, 2, 3], [ACT] * 4, valid=valid, baseline=baseline)
        np.testing.assert_array_equal(advantages, [0.5, -0.5, 0.0, 0.0])
    np.testing.assert_array_equal(role_advantages([np.nan], [0], [0], [ACT], valid=[False]), [0.0])


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_equal_rewards_give_exactly_zero(options):
    for reward in (0.35, 0.1, 1 / 3):
        rewards = np.full(8, reward, np.float32)
        advantages = role_advantages(rewards, [4] * 8, np.arange(8), [REHEARSE] * 8, **options)
        np.testing.assert_array_equal(advantages, np.zeros(8, np.float32))


def test_leave_one_out_compares_with_the_others():
    advantages = role_advantages([0.9, 0.3, 0.0], [0] * 3, [0, 1, 2], [ACT] * 3, leave_one_out=True)
    np.testing.assert_allclose(advantages, [0.9 - 0.15, 0.3 - 0.45, 0.0 - 0.6], atol=1e-7)
    # per trajectory it is the trajectory that is left out: the others of row 0 are trajectory 1 alone
    advantages = role_advantages([1.0, 1.0, 0.4], [0] * 3, [0, 0, 1], [ACT] * 3, leave_one_out=True)
    np.testing.assert_allclose(advantages, [0.6, 0.6, -0.6], atol=1e-7)


def test_scaling_divides_by_the_sample_standard_deviation():
    advantages = role_advantages([1.0, 2.0, 3.0], [0] * 3, [0, 1, 2], [ACT] * 3, scale_by_std=True)
    np.testing.assert_allclose(advantages, [-1.0, 0.0, 1.0], atol=1e-5)  # std with n - 1 is 1


def test_ids_are_names_and_trajectory_ids_may_start_again_in_every_group():
    rewards = [1.0, 0.0, 0.6, 0.2]
    plain = role_advantages(rewards, [0, 0, 1, 1], [0, 1, 2, 3], [ACT] * 4)
    again = role_advantages(rewards, [0, 0, 1, 1], [0, 1, 0, 1], [ACT] * 4)
    strange = role_advantages(rewards, [10**12, 10**12, -7, -7], [5, -3, 9_999, 5], [ACT] * 4)
    words = role_advantages(rewards, ["x", "x", "y", "y"], ["a", "b", "a", "b"], ["act"] * 4)
    for other in (again, strange, words):
        np.testing.assert_array_equal(plain, other)
    np.testing.assert_allclose(plain, [0.5, -0.5, 0.2, -0.2], atol=1e-7)


def test_no_generations_have_no_advantages():
    assert role_advantages([], [], [], []).shape == (0,)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"baseline = 'episode'.*trajectory.*generation"):
        role_advantages([1.0], [0], [0], [ACT], baseline="episode")
    with pytest.raises(ValueError, match=r"trajectory has shape \[2\].*\[1\]"):
        role_advantages([1.0], [0], [0, 1], [ACT])
    with pytest.raises(ValueError, match=r"rewards\[1\] = nan.*not valid"):
        role_advantages([1.0, np.nan], [0, 0], [0, 1], [ACT, ACT])


# Properties, over arbitrary episodes: rows of (reward, group, trajectory, role, valid).
rows = st.lists(
    st.tuples(
        st.floats(0, 1, width=32),
        st.integers(-2, 2),
        st.integers(0, 3),
        st.sampled_from([ACT, REHEARSE]),
        st.booleans(),
    ),
    min_size=1,
    max_size=24,
)
options = st.sampled_from(SETTINGS)


def columns(table):
    rewards, group, trajectory, role, valid = (np.array(column) for column in zip(*table, strict=True))
    return (rewards, group, trajectory, role), valid


@settings(max_examples=100, deadline=None)
@given(rows, options)
def test_advantages_are_always_finite(table, options):
    data, valid = columns(table)
    advantages = role_advantages(*data, valid=valid, **options)
    assert np.isfinite(advantages).all() and (advantages[~valid] == 0).all()


@settings(max_examples=100, deadline=None)
@given(rows, options, st.randoms())
def test_order_of_rows_does_not_matter(table, options, random):
    order = list(range(len(table)))
    random.shuffle(order)
    data, valid = columns(table)
    straight = role_advantages(*data, valid=valid, **options)
    shuffled = role_advantages(*(column[order] for column in data), valid=valid[order], **options)
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-5, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(rows, st.booleans(), st.booleans(), st.floats(-3, 3))
def test_a_shift_of_all_rewards_changes_nothing(table, by_role, leave_one_out, shift):
    (rewards, *ids), valid = columns(table)
    options = dict(valid=valid, by_role=by_role, leave_one_out=leave_one_out)
    moved = role_advantages(rewards + shift, *ids, **options)
    np.testing.assert_allclose(moved, role_advantages(rewards, *ids, **options), atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(rows, options)
def test_groups_do_not_see_each_other(table, options):
    data, valid = columns(table)
    together = role_advantages(*data, valid=valid, **options)
    for group in np.unique(data[1]):
        here = data[1] == group
        alone = role_advantages(*(column[here] for column in data), valid=valid[here], **options)
        np.testing.assert_allclose(together[here], alone, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(rows, options)
def test_invalid_rows_might_as_well_not_be_there(table, options):
    data, valid = columns(table)
    advantages = role_advantages(*data, valid=valid, **options)
    without = role_advantages(*(column[valid] for column in data), **options)
    np.testing.assert_allclose(advantages[valid], without, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(rows, st.booleans())
def test_advantages_of_a_cell_average_to_zero_over_its_trajectories(table, by_role):
    data, valid = columns(table)
    advantages = role_advantages(*data, valid=valid, by_role=by_role)
    _, group, trajectory, role = data
    for cell in {(g, r if by_role else 0) for g, r in zip(group, role, strict=True)}:
        here = valid & (group == cell[0]) & ((role == cell[1]) | (not by_role))
        means = [advantages[here & (trajectory == t)].mean() for t in np.unique(trajectory[here])]
        assert abs(sum(means)) < 1e-5


def test_a_group_has_signal_when_two_valid_rewards_differ():
    rewards = [1.0, 0.0, 0.5, 0.5, 1.0, 0.0, 0.3]
    group = [0, 0, 1, 1, 2, 2, 3]
    valid = [True, True, True, True, True, False, True]
    expected = [True, True, False, False, False, False, False]
    assert groups_with_signal(rewards, group, valid).tolist() == expected
    assert groups_with_signal(rewards, group).tolist() == [True, True, False, False, True, True, False]
    # an invalid row of a group with signal is still not valid
    assert groups_with_signal([1.0, 0.0, np.nan], [9, 9, 9], [True, True, False]).tolist() == [True, True, False]


def test_overlong_penalty_grows_over_the_buffer():
    np.testing.assert_allclose(overlong_penalty([0, 8, 9, 10, 12, 40], 12, 4), [0, 0, -0.25, -0.5, -1, -1])
    with pytest.raises(ValueError, match=r"buffer = 13.*max_length = 12"):
        overlong_penalty([1], 12, 13)


def test_overlong_mask_leaves_out_what_was_cut():
    assert overlong_mask([3, 11, 12, 13], 12).tolist() == [True, True, False, False]
