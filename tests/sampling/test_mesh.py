"""On several devices the engine samples what it samples on one."""

import jax
import numpy as np
import pytest
from flax import nnx

from envace_jax.sampling import Engine, SamplingParams, sequence_key
from models.qwen3 import Qwen3
from models.qwen3.sharding import make_mesh, state_shardings

from .conftest import CONFIG, VOCAB, prompt

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=9, stop_ids=(5,))
PROMPTS = [prompt(n, seed=n) for n in (9, 40, 9, 3, 26)] + [prompt(9, seed=9)]  # one prompt occurs twice


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 1, 2), (2, 2, 1)], ids=str)
def test_a_mesh_does_not_change_what_is_sampled(engine, model, sizes):
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    graph, state = nnx.split(Qwen3(CONFIG, rngs=nnx.Rngs(3), mesh=mesh))
    spread = nnx.merge(graph, jax.device_put(state, state_shardings(state, mesh)))
    meshed = Engine(CONFIG, slots=4, max_length=160, vocab_size=VOCAB, mesh=mesh, decode_chunk=8, prefill_chunk=32)
    expected = engine.generate(model, PROMPTS, PARAMS)
    for a, b in zip(meshed.generate(spread, PROMPTS, PARAMS), expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-4)
    before = meshed.compilations
    meshed.generate(spread, PROMPTS, PARAMS)
    assert meshed.compilations == before

    key = sequence_key(0, 0, 0)
    state = meshed.prefill(spread, meshed.start(), {1: PROMPTS[1]}, {1: key})
    state = meshed.extend(spread, meshed.fork(state, 1, [2], [key]), {2: prompt(5)})
    _, out = meshed.decode(spread, state, {2: 6}, PARAMS)
    alone = engine.prefill(model, engine.start(), {0: np.concatenate([PROMPTS[1], prompt(5)])}, {0: key})
    _, expected = engine.decode(model, alone, {0: 6}, PARAMS)
    np.testing.assert_array_equal(out[2].tokens, expected[0].tokens)
