"""What the compiler makes of the model: work that does not grow with depth, and memory without the logits of a row."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envace_jax.grpo import token_logps
from envace_jax.sampling import slots
from envace_jax.sampling.params import slot_sampling
from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3.modeling import linear
from models.qwen3.sharding import make_mesh


def abstract_model(layers, vocab_size):
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return config, *nnx.split(nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0), remat="layer")))


def gradient(layers, vocab_size, rows, length):
    """The compiled gradient of all log-probabilities of a batch, and the seconds of all cores that it took."""
    _, graphdef, params = abstract_model(layers, vocab_size)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def loss(params, tokens):
        return token_logps(nnx.merge(graphdef, params), tokens, with_entropy=True)[0].sum()

    began = time.process_time()
    compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
    return compiled, time.process_time() - began


def decoding(layers, rows, length):
    """The same of the engine's loop over a stacked cache, and the bytes of that cache."""
    config, graphdef, params = abstract_model(layers, 64)
    state = jax.eval_shape(lambda: slots.empty_slots(config, rows, [length], jnp.float32, None))
    sampling = jax.eval_shape(lambda: slot_sampling(rows, {}))
    vector, scalar = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    def run(params, state, *inputs):
        fixed = {"window": length, "width": 8, "vocab_size": 64, "pin_state": lambda state: state}
        return slots.decode(nnx.merge(graphdef, params), state, *inputs, **fixed)

    began = time.process_time()
    lowered = jax.jit(run, donate_argnums=1).lower(params, state, sampling, vector, vector, scalar, scalar)
    compiled = lowered.compile()
    return compiled, time.process_time() - began, sum(x.size * 4 for x in jax.tree.leaves(state.cache))


@pytest.fixture
def no_cache():
    """Nothing compiled before is taken from the disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.slow(reason="compiles a training pass and a decoding loop three times each")
def test_compile_time_does_not_grow_with_depth(no_cache):
    gradient(2, 64, 1, 32)  # what only the first compilation of a process pays for
    (_, shallow), (_, deep) = gradient(4, 64, 2, 64), gradient(36, 64, 2, 64)
    assert deep < 1.5 * shallow
    decoding(2, 2, 16)
    (_, shallow, _), (_, deep, _) = decoding(4, 2, 32), decoding(36, 2, 32)
    assert deep < 1.5 * shallow


def test_decoding_keeps_one_cache():
    compiled, _, cache = decoding(12, 8, 512)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * cache


def test_no_pass_holds_the_logits_of_all_positions():
    rows, length, vocab_size = 2, 1024, 16_384
    compiled, _ = gradient(1, vocab_size, rows, length)
    logits = 4 * rows * length * vocab_size
    assert compiled.memory_analysis().temp_size_in_bytes < 0.8 * logits  # 0.70 where the chunk's own are a quarter
    assert f"[{rows},{length},{vocab_size}]" not in compiled.as_text()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the products of a CPU")
@pytest.mark.parametrize("rows, kept", [(1, False), (16, True), (128, True), (129, False)])
def test_the_weight_is_the_left_operand_for_few_rows(rows, kept):
    x, w = jax.ShapeDtypeStruct((rows, 64), jnp.float32), jax.ShapeDtypeStruct((96, 64), jnp.float32)
    assert (f"f32[96,{rows}]" in jax.jit(linear).lower(x, w).compile().as_text()) == kept


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the products of a CPU")
@pytest.mark.parametrize(
    "size, sharded, turned",
    [
        ((1024, 128), False, "128,200"),  # the input
        ((128, 1024), False, "128,200"),  # the gradient
        ((1024, 128), True, None),
        ((1000, 128), False, None),
    ],
)
def test_the_gradient_of_a_large_weight_is_a_product_of_what_was_turned_before(size, sharded, turned):
    """And is the same gradient."""
    mesh = make_mesh(data=2, devices=jax.devices()[:2]) if sharded else None
    x, gradient = jax.random.normal(jax.random.key(0), (2, 100, size[1])), jnp.ones((2, 100, size[0]))
    w = jax.random.normal(jax.random.key(1), size)
    pull = jax.jit(lambda x, w: jax.vjp(lambda x, w: linear(x, w, mesh=mesh), x, w)[1](gradient))
    text = pull.lower(x, w).compile().as_text()
    called = re.findall(r"= f32\[([\d,]+)\]\S* call\(", text)
    assert called[:1] == ([turned] if turned else [])
    of_x, of_w = pull(x, w)
    np.testing.assert_allclose(of_x, gradient @ w, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(of_w, jnp.einsum("bti,bto->oi", x, gradient), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_few_rows_is_that_of_the_plain_product(dtype):
    x, w = (jax.random.normal(jax.random.key(i), size, dtype) for i, size in enumerate([(2, 8, 64), (96, 64)]))
    gradient = jnp.ones((2, 8, 96), jnp.float32)
    found, pull = jax.vjp(lambda x, w: linear(x, w, preferred_element_type=jnp.float32), x, w)
    of_x, of_w = pull(gradient)
    assert (found.dtype, of_x.dtype, of_w.dtype) == (jnp.float32, x.dtype, w.dtype)
    precision = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    np.testing.assert_allclose(found, x @ w.T, **precision)
    np.testing.assert_allclose(of_x.astype(jnp.float32), gradient @ w, **precision)
    np.testing.assert_allclose(of_w.astype(jnp.float32), jnp.einsum("bti,bto->oi", x, gradient), **precision)
