"""Live comparison with transformers on torch, where it is installed: other shapes, RoPE scaling, padding, saving."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.qwen3 import load_hf, save_hf

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
def test_logits(tmp_path, changes):
    reference = make(tmp_path, **changes)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(load_hf(tmp_path), tokens), expected, atol=1e-4)


def test_right_padded_rows(tmp_path):
    reference = make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    mask = np.arange(40) < np.array([[40], [23]])
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits.numpy()
    found = logits(load_hf(tmp_path), tokens, segments=jnp.asarray(mask, jnp.int32))
    np.testing.assert_allclose(np.asarray(found)[mask], expected[mask], atol=1e-4)


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
