"""Every configuration of the method and its baselines runs on the embedded world by overrides."""

import pytest
from flax import nnx

from envace_jax.chat.build import train_tokenizer
from envace_jax.config import ConfigError, load_config
from envace_jax.tasks.mini.vocabulary import PATTERN, texts
from envace_jax.train import run
from envace_jax.train.record import read_metrics
from models.qwen3 import Qwen3, Qwen3Config, save_hf
from tests.rewards.endpoint import Endpoint, says

NAMES = ("qwen3_1p7b", "qwen3_8b", "grpo_external", "grpo_real", "split_roles", "act_only", "rehearse_only")
MINI = """tasks.kind=mini tasks.path=null rollout.thinking=false rollout.tasks_per_step=1 rollout.group_size=2
    rollout.max_length=900 rollout.turn_tokens=4 rollout.response_tokens=4 rollout.max_turns=2 train.steps=2
    train.micro_batch=2 train.save_every=2 train.remat=false mesh.data=1 mesh.fsdp=1 logging.tensorboard=false
    evaluation.every=0 rollout.engine=hosted""".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face directory: one layer with random weights, and a tokenizer of the embedded world."""
    directory = tmp_path_factory.mktemp("model")
    train_tokenizer(texts(40), 512, directory / "tokenizer", pattern=PATTERN)
    shape = dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    config = Qwen3Config(vocab_size=512, hidden_size=16, intermediate_size=16, tie_word_embeddings=True, **shape)
    save_hf(Qwen3(config, rngs=nnx.Rngs(0)), directory / "hf", "float32", like=None)
    for path in (directory / "tokenizer").iterdir():
        path.rename(directory / "hf" / path.name)
    return directory / "hf"


@pytest.fixture(scope="module")
def simulator():
    """The URL of a model that simulates tools."""
    endpoint = Endpoint(says('<execution_result>{"ok": true}</execution_result>'))
    yield endpoint.url
    endpoint.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_trains_two_steps_in_the_embedded_world(name, root, model, simulator, tmp_path):
    overrides = [*MINI, f"model={model}", f"output_dir={tmp_path / 'run'}"]
    if name == "grpo_external":
        overrides.append(f"world.endpoint.base_url={simulator}")
    out = run(load_config(root / "configs" / f"{name}.yaml", overrides))
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["tokens/act"] > 0 and line["episodes/valid_fraction"] == 1.0 for line in lines)
    assert (out / "checkpoints" / "2").is_dir()
    assert (out / "rehearser" / "checkpoints" / "2").is_dir() == (name == "split_roles")


def test_the_overlays_change_what_their_names_say(root):
    def load(name):
        return load_config(root / "configs" / f"{name}.yaml")

    main = load("qwen3_8b")
    assert (main.world.kind, main.world.form, main.train.act, main.train.rehearse) == (
        "rehearsal",
        "simulator",
        True,
        True,
    )
    assert (load("grpo_external").world.kind, load("grpo_external").train.rehearse) == ("external", False)
    assert (load("grpo_real").world.kind, load("grpo_real").train.rehearse) == ("real", False)
    assert load("split_roles").world.split_parameters and not main.world.split_parameters
    assert (load("act_only").train.act, load("act_only").train.rehearse) == (True, False)
    assert (load("rehearse_only").train.act, load("rehearse_only").train.rehearse) == (False, True)
    assert load("act_only").grpo == load("split_roles").grpo == main.grpo


def test_the_release_setting_is_the_documented_one(root):
    c = load_config(root / "configs" / "qwen3_8b.yaml")
    assert (c.rollout.tasks_per_step, c.rollout.group_size, c.rollout.max_length) == (16, 4, 20_000)
    assert (c.train.steps, c.train.learning_rate, c.train.weight_decay, c.train.grad_clip) == (470, 1e-6, 0.01, 1.0)
    assert (c.grpo.clip_low, c.grpo.clip_high, c.grpo.dual_clip, c.grpo.kl) == (0.2, 0.2, 3.0, "none")
    assert (c.advantage.baseline, c.advantage.scale_by_std) == ("generation", False)
    assert (c.reward.judge.timeout_s, c.reward.judge.tries, c.reward.judge.max_in_flight) == (120.0, 5, 500)


def test_an_overlay_lies_over_its_base_and_a_base_that_is_not_there_is_named(tmp_path):
    (tmp_path / "base.yaml").write_text("model: m\noutput_dir: runs/a\ntrain: {steps: 3, micro_batch: 2}\n")
    (tmp_path / "over.yaml").write_text("base: base.yaml\noutput_dir: runs/b\ntrain: {steps: 7}\n")
    config = load_config(tmp_path / "over.yaml", ["train.micro_batch=5"])
    assert (config.model, config.output_dir, config.train.steps, config.train.micro_batch) == ("m", "runs/b", 7, 5)
    (tmp_path / "lost.yaml").write_text("base: nowhere.yaml\n")
    with pytest.raises(ConfigError, match="nowhere.yaml"):
        load_config(tmp_path / "lost.yaml")
    (tmp_path / "loop.yaml").write_text("base: loop.yaml\n")
    with pytest.raises(ConfigError, match="its own base"):
        load_config(tmp_path / "loop.yaml")
