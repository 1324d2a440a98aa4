"""Live comparison with transformers on torch, where it is installed: other shapes, RoPE scaling, padding, saving."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3 import Qwen3, Qwen3Config, load_hf, save_hf
from models.qwen3.weights import expected_tensors

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def make(directory, **changes):
    """A random transformers model, float32, saved to `directory`."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=64,
        rope_theta=10_000.0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**shape, **changes})).eval()
    model.save_pretrained(directory)
    return model


def logits(model, tokens, **inputs):
    return jax.jit(lambda t: model.logits(model(t, **inputs)[0]))(jnp.asarray(tokens))


def hidden_states(model, tokens, layers, **inputs):
    """After the first `layers` layers, final norm applied."""
    graphdef, state = nnx.split(model)
    state["layers"] = jax.tree.map(lambda x: x[:layers], state["layers"])
    return jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens, **inputs)[0])(state, jnp.asarray(tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 6},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3, "beta_fast": 8.0}},
    ],
    ids=["plain", "tied mha", "linear", "yarn", "yarn with factor"],
)
def test_hidden_states_and_logits(tmp_path, changes):
    reference, model = make(tmp_path, **changes), load_hf(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    with torch.no_grad():
        out = reference(torch.tensor(tokens), output_hidden_states=True)
        after_one = reference.model.norm(out.hidden_states[1]).numpy()
    np.testing.assert_allclose(hidden_states(model, tokens, 1), after_one, atol=1e-4)
    np.testing.assert_allclose(hidden_states(model, tokens, 2), out.hidden_states[2].numpy(), atol=1e-4)
    np.testing.assert_allclose(logits(model, tokens), out.logits.numpy(), atol=1e-4)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("theta", [1e6, 5e6])
def test_positions_far_beyond_the_trained_context(tmp_path, theta, spelling):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    reference = make(tmp_path, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=32_768)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == theta  # as transformers 5 spells it
    if spelling == "rope_scaling":
        del config["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": theta, "rope_scaling": scaling}))
    tokens = np.random.default_rng(0).integers(0, 96, (1, 40))
    positions = (np.arange(40) * 800)[None]  # up to 31,200
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), position_ids=torch.tensor(positions)).logits.numpy()
    found = logits(load_hf(tmp_path), tokens, positions=jnp.asarray(positions))
    # An angle of thousands is known to some 1e-4 in float32.
    np.testing.assert_allclose(found, expected, atol=2e-3)
    near = logits(load_hf(tmp_path), tokens)
    assert np.abs(np.asarray(near) - expected).max() > 0.1


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "4b", "8b", "14b", "32b"])
def test_every_tensor_of_a_released_size_has_transformers_name_and_shape(size):
    config = Qwen3Config.preset(f"qwen3-{size}")
    with torch.device("meta"):
        reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config.to_hf())).to(torch.bfloat16)
    expected = {name: tuple(x.shape) for name, x in reference.state_dict().items()}
    assert {x.dtype for x in reference.state_dict().values()} == {torch.bfloat16}
    if config.tie_word_embeddings:
        assert expected.pop("lm_head.weight") == expected["model.embed_tokens.weight"]  # one tensor, listed twice
    model = nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
    flat = nnx.to_flat_state(nnx.state(model))
    assert dict(expected_tensors(config, {".".join(path): x.shape for path, x in flat})) == expected
    assert {x.dtype for _, x in flat} == {jnp.dtype(jnp.bfloat16)}


def test_right_padded_rows(tmp_path):
    reference = make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    mask = np.arange(40) < np.array([[40], [23]])
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits.numpy()
    found = logits(load_hf(tmp_path), tokens, segments=jnp.asarray(mask, jnp.int32))
    np.testing.assert_allclose(np.asarray(found)[mask], expected[mask], atol=1e-4)


def test_transformers_generates_from_an_export_what_we_do(tmp_path, tiny):
    # `greedy` is what our own decoding gives, too (test_modeling).
    save_hf(tiny.model, tmp_path / "out", dtype="float32", like=tiny.directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    prompt = torch.tensor(tiny.tokens[:, :8]).long()
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    np.testing.assert_array_equal(found[:, 8:].numpy(), tiny.expected["greedy"])


@pytest.mark.parametrize("split", [False, True])
def test_transformers_loads_what_we_save(tmp_path, tiny, split):
    save_hf(tiny.model, tmp_path / "out", max_shard_size=50_000 if split else 5_000_000_000)
    load = transformers.Qwen3ForCausalLM.from_pretrained
    model, info = load(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    original = load(tiny.directory, dtype="auto").state_dict()
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        found = model.float()(torch.tensor(tiny.tokens).long()).logits
    np.testing.assert_allclose(found.numpy(), tiny.expected["logits"], atol=1e-4)


def test_config_we_write_means_the_same_to_transformers(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    reference = make(tmp_path / "in", rope_scaling=scaling)
    save_hf(load_hf(tmp_path / "in"), tmp_path / "out", dtype="float32")
    again = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, reference(tokens).logits)
