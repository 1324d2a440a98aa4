"""The draw follows the distribution it reports, truncated as NumPy would truncate it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.sampling.params import PRNG_IMPL, SamplingParams, sequence_key, sequence_keys, slot_sampling
from envace_jax.sampling.sampler import sample

V, VOCAB = 300, 290  # more than two blocks, and a padded vocabulary
sample_jit = jax.jit(sample, static_argnums=4)


def draw(logits, params: list[SamplingParams], hold=None, seed=0):
    n = len(params)
    keys = jax.random.split(jax.random.key(seed, impl=PRNG_IMPL), n)
    hold = np.zeros(n, bool) if hold is None else np.asarray(hold)
    sampling = slot_sampling(n, dict(enumerate(params)))
    return [np.asarray(x) for x in sample_jit(jnp.asarray(logits), keys, sampling, hold, VOCAB)]


def reference(logits: np.ndarray, p: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and the kept ids, one id at a time: temperature, then top-k, then top-p of what is left."""
    x = logits[:VOCAB].astype(np.float64) / p.temperature
    logps = x - np.log(np.exp(x - x.max()).sum()) - x.max()
    ranked = sorted(range(VOCAB), key=lambda i: -x[i])[: p.top_k or VOCAB]
    left = np.exp(logps[ranked]).sum()
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= p.top_p:
            break
        kept.append(i)
        mass += np.exp(logps[i]) / left
    return logps, np.array(kept)


LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2
LOGITS[VOCAB:] = 50.0  # ids the tokenizer lacks: the model is sure of them
CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=7),
    SamplingParams(temperature=1.7, top_p=0.5, top_k=40),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=1000),
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_draws_follow_the_truncated_distribution(params):
    n = 4000
    tokens, logps, kept_mass = draw(np.tile(LOGITS, (n, 1)), [params] * n)
    expected, kept = reference(LOGITS, params)
    assert set(tokens) <= set(kept)
    np.testing.assert_allclose(logps, expected[tokens], atol=1e-5)
    mass = np.exp(expected[kept]).sum()
    np.testing.assert_allclose(kept_mass, np.log(mass), atol=1e-5)
    # Chi-square with the rare ids pooled, so that every cell expects at least ten draws.
    counts = np.bincount(tokens, minlength=VOCAB)[kept].astype(float)
    expects = n * np.exp(expected[kept]) / mass
    often = expects >= 10
    counts = np.append(counts[often], counts[~often].sum())
    expects = np.append(expects[often], expects[~often].sum())
    counts, expects = counts[expects > 0], expects[expects > 0]
    chi2, freedom = ((counts - expects) ** 2 / expects).sum(), len(counts) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 1e-6


def test_kept_mass_is_exactly_zero_where_nothing_is_cut():
    _, _, kept = draw(
        np.tile(LOGITS, (3, 1)), [SamplingParams(temperature=0.7), SamplingParams(top_k=3), SamplingParams()]
    )
    assert kept[0] == 0.0 and kept[2] == 0.0 and kept[1] < 0


def test_greedy_takes_the_best_id_of_the_tokenizer_and_reports_it_at_temperature_one():
    tokens, logps, kept = draw(LOGITS[None], [SamplingParams(temperature=0, top_p=0.5)])
    assert tokens[0] == LOGITS[:VOCAB].argmax()
    np.testing.assert_allclose(logps[0], reference(LOGITS, SamplingParams())[0].max(), atol=1e-5)
    assert kept[0] == 0.0


def test_rows_are_drawn_by_their_own_parameters_alone():
    rows = [SamplingParams(), SamplingParams(top_k=2), SamplingParams(temperature=0), SamplingParams(temperature=2.0)]
    logits = np.random.default_rng(1).normal(size=(4, V)).astype(np.float32)
    keys = jax.random.split(jax.random.key(9, impl=PRNG_IMPL), 4)
    together = sample_jit(logits, keys, slot_sampling(4, dict(enumerate(rows))), np.zeros(4, bool), VOCAB)
    for i, params in enumerate(rows):
        alone = sample_jit(logits[i : i + 1], keys[i : i + 1], slot_sampling(1, {0: params}), np.zeros(1, bool), VOCAB)
        assert together[0][i] == alone[0][0]
        np.testing.assert_allclose(together[1][i], alone[1][0], atol=1e-6)


def test_held_back_stop_ids_count_in_the_probabilities_but_are_not_drawn():
    best = int(LOGITS[:VOCAB].argmax())
    n = 500
    params = SamplingParams(stop_ids=(best, 3))
    tokens, _, kept = draw(np.tile(LOGITS, (n, 1)), [params] * n, hold=np.ones(n, bool))
    assert best not in tokens and 3 not in tokens
    p = np.exp(reference(LOGITS, SamplingParams())[0])
    np.testing.assert_allclose(kept, np.log(1 - p[best] - p[3]), atol=1e-5)
    assert best in draw(np.tile(LOGITS, (n, 1)), [params] * n)[0]


def test_ties_at_the_boundary_are_all_kept():
    logits = np.full(V, -5.0, np.float32)
    logits[[4, 150, 280]] = 1.0
    tokens, _, _ = draw(np.tile(logits, (200, 1)), [SamplingParams(top_k=2)] * 200)
    assert set(tokens) == {4, 150, 280}


def test_sequence_keys_are_the_fold_in_chain():
    key = jax.random.key(7, impl=PRNG_IMPL)
    for part in (3, 41, 2):
        key = jax.random.fold_in(key, part)
    np.testing.assert_array_equal(sequence_key(7, 3, 41, 2), np.asarray(jax.random.key_data(key)))
    many = sequence_keys(7, 3, [0, 41, 5], 2)
    np.testing.assert_array_equal(many[1], sequence_key(7, 3, 41, 2))
    assert len({tuple(k) for k in many}) == 3


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("max_new_tokens", 0)]
)
def test_impossible_parameters_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
