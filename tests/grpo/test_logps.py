"""Log-probabilities of given tokens: whose they are, how they are normalised, and that no [B, T, V] is ever made."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax.grpo import token_logps
from launch.hlo import collectives
from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3.sharding import make_mesh, shard_model
from tests.tiny import tiny_config

VOCAB, WIDTH = 11, 6


class Bigram:
    """A model whose logits after token i are table[i]: hidden states are one-hot, padding is NaN."""

    def __init__(self, table):
        self.table = table

    def __call__(self, tokens, positions, segments):
        hidden = jax.nn.one_hot(tokens, VOCAB)
        if segments is not None:
            hidden = jnp.where((segments != 0)[..., None], hidden, jnp.nan)
        return hidden, None

    def head(self):
        return self.table

    def logits(self, hidden, head):
        return hidden @ head


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, 9, (2, WIDTH)).astype(np.int32)


def expected_logps(table, tokens, temperature=1.0, vocab_size=VOCAB):
    logits = table[tokens[:, :-1]].astype(float)[..., :vocab_size] / temperature
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, tokens[:, 1:, None], -1)[..., 0]
    entropy = -np.sum(probabilities * np.log(probabilities), -1)
    first = np.zeros((len(tokens), 1))
    return np.concatenate([first, np.log(chosen)], 1), np.concatenate([first, entropy], 1)


@pytest.mark.parametrize("chunk", [1, 4, 6, 100])
def test_each_value_belongs_to_its_own_token_whatever_the_chunk(table, tokens, chunk):
    logps = token_logps(Bigram(table), tokens, chunk=chunk)
    assert logps.dtype == jnp.float32
    np.testing.assert_allclose(logps, expected_logps(table, tokens)[0], atol=1e-5)
    assert (np.asarray(logps)[:, 0] == 0).all()


def test_tempered_and_normalised_over_the_tokenizers_ids(table, tokens):
    logps, entropy = token_logps(Bigram(table), tokens, temperature=0.6, vocab_size=9, with_entropy=True, chunk=4)
    expected = expected_logps(table, tokens, 0.6, 9)
    np.testing.assert_allclose(logps, expected[0], atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-5)


def test_a_segment_starts_with_zero_and_padding_is_zero(table):
    tokens = np.array([[3, 1, 4, 1, 5, 0]], np.int32)
    segments = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
    logps, entropy = token_logps(Bigram(table), tokens, segments=segments, with_entropy=True)
    expected = np.array(expected_logps(table, tokens))
    expected[:, :, [3, 5]] = 0
    np.testing.assert_allclose([logps, entropy], expected, atol=1e-5)


def test_the_gradient_is_that_of_the_plain_formula_and_ignores_nan_padding(table):
    tokens = np.array([[3, 1, 4, 1, 0, 0]], np.int32)
    segments = np.array([[1, 1, 1, 1, 0, 0]], np.int32)

    def chunked(table):
        logps, entropy = token_logps(Bigram(table), tokens, segments=segments, vocab_size=9, with_entropy=True, chunk=4)
        return jnp.sum(logps) + jnp.sum(entropy)

    def plain(table):
        logps = jax.nn.log_softmax(table[tokens[0, :3], :9])
        return jnp.sum(logps[jnp.arange(3), tokens[0, 1:4]]) - jnp.sum(jnp.exp(logps) * logps)

    got, want = (jax.value_and_grad(f)(jnp.asarray(table)) for f in (chunked, plain))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_what_is_not_needed_is_zero_and_the_rest_as_before(table, share):
    """Value and gradient, with NaN in the padding."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 9, (3, 20)).astype(np.int32)
    segments = np.ones((3, 20), np.int32)
    segments[1, 7:], segments[2, 15:] = 2, 0
    needed = rng.random((3, 20)) < share

    def scored(table, **arguments):
        values = token_logps(Bigram(table), tokens, segments=segments, with_entropy=True, **arguments)
        values = [jnp.where(needed, x, 0.0) for x in values] if not arguments else values
        return jnp.sum(values[0] * jnp.arange(20)) + jnp.sum(values[1] ** 2), values

    (_, want), whole = jax.value_and_grad(scored, has_aux=True)(jnp.asarray(table))
    (_, got), part = jax.jit(jax.value_and_grad(partial(scored, needed=jnp.asarray(needed)), has_aux=True))(table)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-5)


def test_the_head_meets_as_many_pieces_as_the_fullest_row_needs(table):
    """Four pieces of 5 positions: rows that need 6 and 2 take two, wherever in the row they are."""
    seen = []

    class Counting(Bigram):
        def logits(self, hidden, head):
            jax.debug.callback(lambda: seen.append(hidden.shape))
            return super().logits(hidden, head)

    needed = np.zeros((2, 20), bool)
    needed[0, 3::3], needed[1, [5, 19]] = True, True
    token_logps(Counting(table), jnp.ones((2, 20), jnp.int32), needed=needed)
    jax.effects_barrier()
    assert seen == [(2, 5, VOCAB)] * 2


def largest_value(jaxpr) -> int:
    """Elements of the largest intermediate anywhere in a jaxpr."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape)) for v in equation.outvars]
        sizes += [largest_value(inner) for inner in jaxprs_in_params(equation.params)]
    return max(sizes)


def test_neither_pass_holds_the_logits_of_all_positions():
    """Nothing is larger than the head or the logits of a chunk; those of all positions would be 2 x 64 x 512."""
    batch, length, vocab, size, chunk = 2, 64, 512, 8, 4
    tokens = jnp.zeros((batch, length), jnp.int32)

    class Head:
        def __init__(self, table):
            self.table = table

        def __call__(self, tokens, positions, segments):
            return jnp.ones((*tokens.shape, size)) * self.table[0], None

        def head(self):
            return self.table

        def logits(self, hidden, head):
            return hidden @ head.T

    def loss(head):
        return sum(jnp.sum(x) for x in token_logps(Head(head), tokens, chunk=chunk, with_entropy=True))

    for function in (loss, jax.grad(loss)):
        jaxpr = jax.make_jaxpr(function)(jnp.ones((vocab, size)))
        assert largest_value(jaxpr.jaxpr) <= max(batch * chunk * vocab, vocab * size)


def test_wrong_arguments_are_named(table, tokens):
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logps(Bigram(table), tokens, temperature=0)
    with pytest.raises(ValueError, match="chunk = 0"):
        token_logps(Bigram(table), tokens, chunk=0)


def test_qwen3_packed_into_a_row_scores_as_it_does_alone():
    """Two sequences in one row with padding, temperature, a padded vocabulary, jitted with its parameters traced."""
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    graph, state = nnx.split(Qwen3(config, rngs=nnx.Rngs(0)))

    @jax.jit
    def packed(state, tokens, positions, segments, temperature):
        def total(state):
            logps = token_logps(
                nnx.merge(graph, state), tokens, positions, segments, temperature=temperature, vocab_size=30, chunk=4
            )
            return jnp.sum(logps), logps

        return jax.grad(total, has_aux=True)(state)

    @jax.jit
    def alone(state, sequences):
        model = nnx.merge(graph, state)
        return jax.nn.log_softmax(model.logits(model(sequences)[0])[..., :30] / 0.6)

    tokens = np.array([[5, 9, 2, 7, 1, 1, 3, 0, 0]], np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 1]], np.int32)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]], np.int32)
    gradient, logps = packed(state, tokens, positions, segments, 0.6)

    first, second = np.asarray(alone(state, np.array([[5, 9, 2, 7], [1, 1, 3, 0]], np.int32)))
    expected = [0, first[0, 9], first[1, 2], first[2, 7], 0, second[0, 1], second[1, 3], 0, 0]
    np.testing.assert_allclose(logps, [expected], atol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 2), (4, 1, 2)])
def test_on_a_mesh_values_are_the_same_and_the_head_moves_once(sizes):
    """A gradient that went round after every piece would grow with their number, and be larger than a piece."""
    mesh = make_mesh(*sizes)
    config = dataclasses.replace(tiny_config(), vocab_size=1024, num_hidden_layers=1)
    plain = Qwen3(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 1000, (4, 32)).astype(np.int32)
    needed = rng.random((4, 32)) < np.array([[0.0], [0.2], [0.5], [0.9]])

    def loss(model, tokens, needed):
        logps, entropy = token_logps(model, tokens, needed=needed, vocab_size=1000, with_entropy=True, chunk=4)
        return jnp.sum(logps * jnp.arange(32)) + jnp.sum(entropy**2)

    gradient = nnx.jit(nnx.value_and_grad(loss))
    want = gradient(plain, tokens, needed)
    place = NamedSharding(mesh, P(("data", "fsdp")))
    placed = (shard_model(plain, mesh), jax.device_put(tokens, place), jax.device_put(needed, place))
    for found, expected in zip(jax.tree.leaves(gradient(*placed)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)

    text = gradient.lower(*placed).compile().as_text()
    once, twice = (sum(kind.bytes for kind in collectives(text, (n,)).values()) for n in (1, 2))
    piece, head = 4 * config.hidden_size * 4, config.vocab_size // 2 * config.hidden_size * 4
    assert twice - once <= 4 * piece < head / 4
