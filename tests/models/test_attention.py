"""Every attention kernel gives the result of the plain formula."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from models.qwen3 import attention
from models.qwen3.modeling import _remat
from models.qwen3.sharding import make_mesh


def inputs(batch, length, heads, kv_heads, head_dim):
    rng = np.random.default_rng(0)
    shapes = [
        (batch, length, heads, head_dim),
        (batch, length, kv_heads, head_dim),
        (batch, length, kv_heads, head_dim),
    ]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def plain(q, k, v, mask):
    """Softmax attention in float64, head by head; mask [B, T, S]."""
    out = np.zeros(q.shape)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        kv = h // (q.shape[2] // k.shape[2])
        scores = q[b, :, h].astype(np.float64) @ k[b, :, kv].T / np.sqrt(q.shape[3])
        weights = np.exp(np.where(mask[b], scores, -np.inf))
        out[b, :, h] = weights / weights.sum(-1, keepdims=True) @ v[b, :, kv]
    return out


def causal(batch, length, segments=None):
    mask = np.broadcast_to(np.tril(np.ones((length, length), bool)), (batch, length, length))
    return mask if segments is None else mask & (segments[:, :, None] == segments[:, None, :])


def used_program(attend, arrays):
    """What the gradients of attention are computed by."""
    program = jax.make_jaxpr(jax.grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2)))(*arrays).jaxpr
    return partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0]


def count(jaxpr, primitive: str) -> int:
    inner = [jaxpr for equation in jaxpr.eqns for jaxpr in jaxprs_in_params(equation.params)]
    return sum(e.primitive.name == primitive for e in jaxpr.eqns) + sum(count(x, primitive) for x in inner)


def test_self_attention_is_causal_within_segments():
    q, k, v = inputs(2, 6, 4, 2, 8)
    segments = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    out = attention.self_attention(q, k, v, jnp.asarray(segments))
    np.testing.assert_allclose(out, plain(q, k, v, causal(2, 6, segments)), atol=1e-5)
    np.testing.assert_allclose(attention.self_attention(q, k, v), plain(q, k, v, causal(2, 6)), atol=1e-5)


@pytest.mark.parametrize("rows, length, segmented", [(3, 384, True), (2, 256, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_heads_in_blocks_equal_the_plain_formula(rows, length, segmented, dtype):
    """Values and gradients, which the backward pass makes from the result."""
    arrays = [jnp.asarray(x, dtype) for x in inputs(rows, length, 4, 2, 64)]
    segments = jnp.asarray(np.repeat([[1, 2, 0]], length // 3, 1).repeat(rows, 0)) if segmented else None
    mask = jnp.asarray(causal(rows, length, None if segments is None else np.asarray(segments)))
    weights = np.random.default_rng(1).normal(size=arrays[0].shape).astype(np.float32)

    def run(attend):
        def loss(*arrays):
            out = attend(*arrays)
            return jnp.sum(out * weights), out

        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
        return [out, *gradients]

    found = run(lambda *x: attention.self_attention(*x, segments))
    expected = run(lambda *x: attention._xla(*(y.astype(jnp.float32) for y in x), mask).astype(dtype))
    assert attention._blocks(length) > 1
    precision = {"atol": 1e-4} if dtype == "float32" else {"rtol": 0.05, "atol": 0.05}
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), **precision)


@pytest.mark.parametrize("policy, products", [("layer", 9), ("dots", 7)])
def test_what_blocks_keep_under_dots_is_not_computed_again(policy, products):
    """Two products forward, perhaps once more, the scores for the backward pass, and its four."""
    arrays = inputs(1, 128, 2, 2, 64)
    attend = _remat(lambda *x: attention.self_attention(*x, implementation="xla"), policy)
    assert count(used_program(attend, arrays), "dot_general") == products


@pytest.mark.parametrize("length", [300, 384])
def test_long_rows_go_in_blocks_of_queries(monkeypatch, length):
    """Values and gradients; no block's scores are those of a whole row."""
    arrays = [jnp.asarray(x) for x in inputs(2, length, 4, 2, 8)]
    segments = jnp.asarray(np.repeat([[1, 2, 0]], length // 3, 1).repeat(2, 0))

    def run(*arrays):
        out = attention.self_attention(*arrays, segments)
        return jnp.sum(out**2), out

    def whole():
        gradients, out = jax.grad(run, argnums=(0, 1, 2), has_aux=True)(*arrays)
        return [out, *gradients]

    expected = whole()
    monkeypatch.setattr(attention, "_LONG", 256)
    for got, want in zip(whole(), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    text = jax.jit(jax.grad(lambda *a: run(*a)[0], argnums=(0, 1, 2))).lower(*arrays).as_text()
    assert f"x{length}x{length}xf32" not in text


@pytest.mark.parametrize("tokens", [1, 3])
def test_cached_attention_sees_slots_up_to_its_position(tokens):
    q, k, v = inputs(2, 9, 6, 3, 8)
    positions = np.array([[0, 4, 8], [7, 2, 3]])[:, :tokens]
    mask = np.arange(9) <= positions[..., None]
    stored = (k.swapaxes(1, 2), v.swapaxes(1, 2))
    out = attention.cached_attention(q[:, :tokens], *stored, jnp.asarray(positions))
    np.testing.assert_allclose(out, plain(q[:, :tokens], k, v, mask), atol=1e-5)


def test_long_pieces_over_long_caches_go_in_blocks_of_queries(monkeypatch):
    q, k, v = inputs(2, 24, 4, 2, 8)
    q, positions = q[:, :12], jnp.asarray(np.arange(12) + np.array([[3], [9]]))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    whole = attention.cached_attention(q, k, v, positions)
    monkeypatch.setattr(attention, "_SCORES", 4 * 24 * 3)  # three queries at a time
    program = jax.make_jaxpr(attention.cached_attention)(q, k, v, positions)
    assert "f32[2,2,2,3,24]" in str(program) and "f32[2,2,2,12,24]" not in str(program)
    np.testing.assert_allclose(attention.cached_attention(q, k, v, positions), whole, atol=1e-6)


@pytest.mark.parametrize("length, block, sharded", [(128, 512, False), (128, 512, True), (200, 128, False)])
def test_splash_equals_the_plain_formula(length, block, sharded):
    # The TPU kernel, interpreted; sharded over rows and heads as on a pod; of a length that no block divides.
    q, k, v = inputs(2, length, 4, 2, 128)
    segments = np.repeat([[1, 2, 3, 0], [1, 1, 1, 2]], length // 4, axis=1)
    mesh = make_mesh(data=2, tp=2, devices=jax.devices()[:4]) if sharded else None
    out = jax.jit(lambda q, k, v, s: attention._splash(q, k, v, s, mesh, block, interpret=True))(
        q, k, v, jnp.asarray(segments)
    )
    np.testing.assert_allclose(out, plain(q, k, v, causal(2, length, segments)), atol=2e-5)


def test_gradients_of_splash_are_those_of_xla():
    q, k, v = inputs(1, 136, 2, 1, 128)
    segments = jnp.asarray(np.repeat([[1, 2]], 68, axis=1))
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def gradient(attend):
        return jax.jit(jax.grad(lambda *x: (attend(*x) * weights).sum(), argnums=(0, 1, 2)))(q, k, v)

    found = gradient(lambda q, k, v: attention._splash(q, k, v, segments, None, 128, interpret=True))
    expected = gradient(lambda q, k, v: attention.self_attention(q, k, v, segments, implementation="xla"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), found, expected)


@pytest.mark.parametrize("policy, kernels", [("layer", 4), ("dots", 3)])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_splash_keeps_under_dots_is_not_computed_again(policy, kernels, sharded):
    """Forward, perhaps once more, and two kernels of the backward pass."""
    q, k, v = inputs(2, 128, 2, 2, 128)
    mesh = make_mesh(data=2, tp=2, devices=jax.devices()[:4]) if sharded else None
    attend = _remat(lambda q, k, v: attention._splash(q, k, v, None, mesh, 128, interpret=True), policy)
    assert count(used_program(attend, (q, k, v)), "pallas_call") == kernels


_ON_GPU = """
import jax, jax.numpy as jnp, numpy as np
from models.qwen3.attention import choose, self_attention
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(2, 256, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2))
segments = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 1, 2]], 64, axis=1))
weights = jnp.where(segments[..., None, None] > 0, jnp.asarray(rng.normal(size=q.shape), jnp.bfloat16), 0)
assert choose("auto", length=256, head_dim=64, dtype=q.dtype) == "cudnn"
def of(kernel):
    def loss(q, k, v):
        return (self_attention(q, k, v, segments, implementation=kernel) * weights).astype(jnp.float32).sum()
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
for a, b in zip(*(jax.tree.leaves(of(kernel)) for kernel in ("cudnn", "xla"))):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.abs(a - b).max() < 0.05 * np.abs(b).max(), (np.abs(a - b).max(), np.abs(b).max())
"""


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs a GPU")
def test_cudnn_gives_the_values_and_gradients_of_xla(root):
    # In a process of its own: this one's devices are simulated.
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    subprocess.run([sys.executable, "-c", _ON_GPU], cwd=root, env=environment, check=True, timeout=600)


@pytest.mark.parametrize(
    "platform, length, head_dim, dtype, kernel",
    [
        ("cpu", 256, 128, "float32", "xla"),
        ("tpu", 256, 128, "bfloat16", "splash"),
        ("tpu", 200, 128, "bfloat16", "splash"),
        ("tpu", 100, 128, "bfloat16", "xla"),
        ("tpu", 256, 64, "bfloat16", "xla"),
        ("gpu", 200, 128, "bfloat16", "cudnn"),
        ("gpu", 201, 128, "bfloat16", "xla"),
        ("gpu", 200, 128, "float32", "xla"),
        ("gpu", 200, 256, "bfloat16", "xla"),
    ],
)
def test_auto_takes_the_flash_kernel_where_it_applies(monkeypatch, platform, length, head_dim, dtype, kernel):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert attention.choose("auto", length=length, head_dim=head_dim, dtype=dtype) == kernel
    assert attention.choose("xla", length=length, head_dim=head_dim, dtype=dtype) == "xla"
