"""The forward pass against transformers, and against itself where two ways must give one result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3 import CacheRows, KVCache, Qwen3, Qwen3Config, init_cache, load_hf
from models.qwen3.modeling import linear

SMALL = Qwen3Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    initializer_range=0.3,
)


def small_model() -> Qwen3:
    """Random parameters, norms included, without compiling an initialiser."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen3(SMALL, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0.3, 0.3, x.shape), x.dtype), state))


@functools.partial(jax.jit, static_argnums=0, static_argnames="window")
def forward(graphdef, state, tokens, positions=None, segments=None, cache=None, window=None):
    model = nnx.merge(graphdef, state)
    hidden, cache = model(tokens, positions, segments, cache, window=window)
    return hidden, model.logits(hidden), cache


def run(model, tokens, **inputs):
    return forward(*nnx.split(model), jnp.asarray(tokens), **inputs)


def positions_of(tokens, start=0):
    return jnp.broadcast_to(jnp.arange(start, start + tokens.shape[1], dtype=jnp.int32), tokens.shape)


# Against transformers (values from tests/fixtures/make_qwen3_tiny.py)


def test_logits_equal_transformers(tiny):
    _, logits, _ = run(tiny.model, tiny.tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tiny.expected["logits"], atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_hidden_states_equal_transformers_after_each_layer(tied, layers):
    graphdef, state = nnx.split(tied.model)
    state["layers"] = jax.tree.map(lambda x: x[:layers], state["layers"])
    hidden, _, _ = forward(graphdef, state, jnp.asarray(tied.tokens))
    np.testing.assert_allclose(hidden, tied.expected["after_layer"][layers - 1], atol=1e-4)


def test_greedy_decoding_with_a_cache_equals_transformers(tiny):
    prompt, steps = jnp.asarray(tiny.tokens[:, :8]), tiny.expected["greedy"].shape[1]
    cache = init_cache(tiny.model.config, 2, 8 + steps, jnp.float32)
    _, logits, cache = run(tiny.model, prompt, positions=positions_of(prompt), cache=cache)
    sampled = [jnp.argmax(logits[:, -1], axis=-1)]
    for step in range(steps - 1):
        position = jnp.full((2, 1), 8 + step, jnp.int32)
        _, logits, cache = run(tiny.model, sampled[-1][:, None], positions=position, cache=cache)
        sampled.append(jnp.argmax(logits[:, 0], axis=-1))
    np.testing.assert_array_equal(np.stack(sampled, axis=1), tiny.expected["greedy"])


def test_bfloat16_arithmetic_stays_close_to_float32(tiny):
    model = load_hf(tiny.directory, dtype=jnp.bfloat16)
    hidden, logits, _ = run(model, tiny.tokens)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    expected = tiny.expected["logits"]
    logp, logq = jax.nn.log_softmax(expected), jax.nn.log_softmax(logits)
    assert float((jnp.exp(logp) * (logp - logq)).sum(-1).mean()) < 1e-3
    # Of random weights' near-ties transformers' own bfloat16 flips 5 % (KL 0.0009 and 0.0012); they say nothing.
    best = np.sort(expected, axis=-1)
    decided = best[..., -1] - best[..., -2] > 0.1
    assert decided.mean() > 0.85
    assert (logits.argmax(-1) == expected.argmax(-1))[decided].mean() >= 0.98


# The cache


@pytest.fixture(scope="module")
def small() -> Qwen3:
    return small_model()


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 64, (3, 12)), jnp.int32)


def test_chunks_through_a_cache_equal_one_forward_pass(small, tokens):
    _, whole, none = run(small, tokens)
    assert none is None
    cache = init_cache(SMALL, 3, 16, jnp.float32)
    parts = []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        chunk = tokens[:, start:stop]
        _, logits, cache = run(small, chunk, positions=positions_of(chunk, start), cache=cache)
        parts.append(logits)
    assert isinstance(cache, KVCache) and cache.k.shape == (2, 3, 2, 16, 8)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)


def test_rows_advance_independently(small, tokens):
    # Row b has b + 2 tokens; one more is decoded in each.
    lengths = jnp.arange(3, dtype=jnp.int32) + 2
    cache = init_cache(SMALL, 3, 12, jnp.float32)
    prompt = tokens[:, :4]
    positions = jnp.where(positions_of(prompt) < lengths[:, None], positions_of(prompt), 12)  # padding: dropped
    _, _, cache = run(small, prompt, positions=positions, cache=cache)
    following = tokens[jnp.arange(3), lengths][:, None]
    _, logits, _ = run(small, following, positions=lengths[:, None], cache=cache)
    _, whole, _ = run(small, tokens)
    np.testing.assert_allclose(logits[:, 0], whole[jnp.arange(3), lengths], atol=1e-5)


@pytest.mark.parametrize("outside", [-1, 12, 1000])
def test_positions_outside_the_cache_write_nothing(small, tokens, outside):
    cache = init_cache(SMALL, 3, 12, jnp.float32)
    marked = jax.tree.map(lambda x: x + 7.0, cache)
    position = jnp.array([[3], [outside], [5]], jnp.int32)
    hidden, _, written = run(small, tokens[:, :1], positions=position, cache=marked)
    changed = np.asarray((written.k != 7.0).any(axis=(0, 2, 4)))  # [B, S]
    assert [tuple(x) for x in np.argwhere(changed)] == [(0, 3), (2, 5)]
    assert np.isfinite(hidden).all()


def test_window_reads_only_the_first_slots(small, tokens):
    cache = init_cache(SMALL, 3, 64, jnp.float32)
    poisoned = jax.tree.map(lambda x: x.at[:, :, :, 12:].set(jnp.nan), cache)
    _, whole, _ = run(small, tokens)
    _, logits, _ = run(small, tokens, positions=positions_of(tokens), cache=poisoned, window=12)
    np.testing.assert_allclose(logits, whole, atol=1e-5)


def test_some_rows_of_a_cache_are_extended_where_they_lie(small, tokens):
    # Rows 3 and 1 of five; the last two of the batch are padding, whose row is outside. Every row is the same before.
    start = jax.tree.map(lambda x: x + 7.0, init_cache(SMALL, 5, 12, jnp.float32))
    batch = jnp.concatenate([tokens[:2], tokens[:2]])[:, :4]
    positions = positions_of(batch).at[1, 3].set(12)  # one token of padding: not stored
    rows = jnp.array([3, 1, 5, 99], jnp.int32)
    hidden, _, view = run(small, batch, positions=positions, cache=CacheRows(start, rows), window=8)
    alone, _, expected = run(small, batch, positions=positions, cache=jax.tree.map(lambda x: x[:, :4], start))
    np.testing.assert_allclose(hidden[0], alone[0], atol=1e-5)
    np.testing.assert_allclose(hidden[1, :3], alone[1, :3], atol=1e-5)
    np.testing.assert_allclose(view.cache.k[:, rows[:2]], expected.k[:, :2], atol=1e-5)
    np.testing.assert_allclose(view.cache.v[:, rows[:2]], expected.v[:, :2], atol=1e-5)
    assert (view.cache.k[:, jnp.array([0, 2, 4])] == 7).all() and (view.cache.k[:, 1, :, 3:] == 7).all()


def test_cache_needs_positions_and_refuses_segments(small, tokens):
    cache = init_cache(SMALL, 3, 12, jnp.float32)
    with pytest.raises(ValueError, match="positions"):
        small(tokens, cache=cache)
    with pytest.raises(ValueError, match="segments"):
        small(tokens, positions=positions_of(tokens), segments=jnp.ones_like(tokens), cache=cache)


# Segments


def test_packed_segments_equal_separate_rows(small, tokens):
    first, second = tokens[0, :5], tokens[1, :6]
    packed = jnp.concatenate([first, second, jnp.zeros(1, jnp.int32)])[None]
    segments = jnp.array([[1] * 5 + [2] * 6 + [0]], jnp.int32)
    positions = jnp.array([[*range(5), *range(6), 0]], jnp.int32)
    _, logits, _ = run(small, packed, positions=positions, segments=segments)
    _, alone_first, _ = run(small, first[None])
    _, alone_second, _ = run(small, second[None])
    np.testing.assert_allclose(logits[:, :5], alone_first, atol=1e-5)
    np.testing.assert_allclose(logits[:, 5:11], alone_second, atol=1e-5)


def test_padding_changes_nothing_and_gives_no_gradient(small, tokens):
    graphdef, state = nnx.split(small)
    segments = (positions_of(tokens) < jnp.array([[12], [7], [4]])).astype(jnp.int32)
    other = jnp.where(segments == 0, 9, tokens)

    @jax.jit
    def loss(state, tokens):
        hidden, _ = nnx.merge(graphdef, state)(tokens, segments=segments)
        return jnp.where(segments[..., None] > 0, hidden, 0).sum()

    value, gradient = jax.value_and_grad(loss)(state, tokens)
    other_value, other_gradient = jax.value_and_grad(loss)(state, other)
    assert float(value) == pytest.approx(float(other_value), abs=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradient, other_gradient)


# Options


def test_remat_saves_less_and_changes_no_gradient(small, tokens):
    def loss(state, policy):
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: Qwen3(SMALL, rngs=nnx.Rngs(0), remat=policy)))
        return (nnx.merge(graphdef, state)(tokens)[0] ** 2).sum()

    def saved_for_backward(policy: str) -> int:
        residuals = jax.eval_shape(lambda s: jax.vjp(lambda s: loss(s, policy), s)[1], state)
        return sum(x.size for x in jax.tree.leaves(residuals))

    state = nnx.state(small)
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    expected = gradient(state, "none")
    for policy in ("layer", "dots", "offload"):
        found = gradient(state, policy)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), expected, found)
    assert saved_for_backward("layer") < saved_for_backward("dots") < saved_for_backward("none")


def test_offloaded_layer_inputs_wait_in_the_hosts_memory(small, tokens):
    def program(policy: str) -> str:
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: Qwen3(SMALL, rngs=nnx.Rngs(0), remat=policy)))
        return str(jax.make_jaxpr(jax.grad(lambda s: nnx.merge(graphdef, s)(tokens)[0].sum()))(nnx.state(small)))

    layers_batch_length_hidden = "[2,3,12,16]"
    assert f"f32<host>{layers_batch_length_hidden}" in program("offload")
    assert f"f32{layers_batch_length_hidden}" not in program("offload")
    assert f"f32{layers_batch_length_hidden}" in program("layer")


def test_unknown_options_are_refused(tokens):
    with pytest.raises(ValueError, match="none, layer, dots, offload"):
        Qwen3(SMALL, rngs=nnx.Rngs(0), remat="full")
    with pytest.raises(ValueError, match="auto, xla, splash, cudnn"):
        Qwen3(SMALL, rngs=nnx.Rngs(0), attention="flash")
    with pytest.raises(ValueError, match="multiple of 128"):
        Qwen3(SMALL, rngs=nnx.Rngs(0), attention_block=100)


def test_types_of_parameters_and_arithmetic(tokens):
    model = nnx.jit(lambda: Qwen3(SMALL, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))()
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    q_proj = np.asarray(model.layers.q_proj[...], np.float32)
    assert q_proj.std() == pytest.approx(SMALL.initializer_range, rel=0.1)
    assert not np.array_equal(q_proj[0], q_proj[1]) and (model.norm[...] == 1).all()
    assert jax.eval_shape(lambda: model(tokens)[0]).dtype == jnp.float32  # the default on a CPU


def test_program_does_not_grow_with_depth(tokens):
    def size(layers: int) -> int:
        config = Qwen3Config(**{**vars(SMALL), "num_hidden_layers": layers})
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0))))
        loss = jax.grad(lambda s: nnx.merge(graphdef, s)(tokens)[0].sum())
        return len(jax.jit(loss).lower(state).as_text().splitlines())

    assert size(24) == size(2)


@pytest.mark.parametrize("rows", [(2, 3), (40, 2)])
def test_linear_is_the_same_product_for_few_and_many_rows(rows):
    x, w = np.random.default_rng(0).normal(size=(*rows, 5)), np.random.default_rng(1).normal(size=(7, 5))
    out = linear(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
    np.testing.assert_allclose(out, x @ w.T, atol=1e-5)
