"""A configuration is refused with a message that names the key, the place and the remedy, or it means what it says."""

import dataclasses
import re

import pytest

from envace_jax.config import (
    Config,
    ConfigError,
    SFTConfig,
    diff_on_resume,
    from_dict,
    load_config,
    save_config,
    to_dict,
)
from envace_jax.errors import EnvaceError

MINIMAL = "model: qwen3-0.6b\noutput_dir: runs/x\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refuse(path, *overrides, schema=Config):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, schema)
    return str(caught.value)


def test_defaults_are_those_of_the_release(write):
    config = load_config(write(MINIMAL))
    assert (config.rollout.group_size, config.rollout.tasks_per_step, config.rollout.max_turns) == (4, 16, 30)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k) == (1.0, 1.0, 0)
    assert (config.train.learning_rate, config.train.weight_decay, config.train.grad_clip) == (1e-6, 0.01, 1.0)
    assert (config.train.updates_per_batch, config.train.steps) == (1, 470)
    assert (config.grpo.clip_low, config.grpo.clip_high, config.grpo.dual_clip) == (0.2, 0.2, 3.0)
    assert (config.grpo.kl, config.grpo.entropy_coef) == ("none", 0.0)
    assert (config.evaluation.temperature, config.evaluation.top_p) == (0.6, 0.95)
    assert (config.world.kind, config.world.form) == ("rehearsal", "inline")
    assert (config.advantage.baseline, config.advantage.by_role) == ("trajectory", True)


def test_overrides_win_over_the_file_and_later_over_earlier(write):
    path = write(MINIMAL + "train: {steps: 7, learning_rate: 3.0e-5}\n")
    config = load_config(path, ["train.steps=8", "train.steps=9", "world.kind=real", "grpo.kl=k3"])
    assert (config.train.steps, config.train.learning_rate) == (9, 3e-5)
    assert (config.world.kind, config.grpo.kl) == ("real", "k3")


def test_numbers_may_be_written_in_the_usual_ways(write):
    config = load_config(write(MINIMAL), ["train.learning_rate=1e-4", "rollout.temperature=1", "train.row_length=null"])
    assert config.train.learning_rate == 1e-4
    assert config.rollout.temperature == 1.0 and isinstance(config.rollout.temperature, float)
    assert config.train.row_length is None


def test_values_may_refer_to_each_other(write):
    config = load_config(write("model: m\noutput_dir: runs/seed-${seed}\nseed: 3\n"))
    assert config.output_dir == "runs/seed-3"


def test_a_list_becomes_the_tuple_of_the_schema(write):
    assert load_config(write(MINIMAL), ["grpo.role_weights=[1, 0]"]).grpo.role_weights == (1.0, 0.0)


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("train.learning_rat=1", "train.learning_rat", "train.learning_rate"),
        ("lerning_rate=1", "lerning_rate", "train.learning_rate"),
        ("group_size=4", "group_size", "rollout.group_size"),
        ("rollout.steps=4", "rollout.steps", "train.steps"),
        ("modle=x", "modle", "model"),
        ("roll_out.slots=2", "roll_out", "rollout"),
        ("world.from=inline", "world.from", "world.form"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(write, override, unknown, nearest):
    assert refuse(write(MINIMAL), override) == f"command line: unknown key {unknown!r}; did you mean {nearest!r}?"


def test_an_unknown_key_in_the_file_names_the_file(write):
    path = write(MINIMAL + "grpo: {clip_hi: 0.3}\n")
    assert refuse(path) == f"{path}: unknown key 'grpo.clip_hi'; did you mean 'grpo.clip_high'?"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=many", "train.steps='many': expected an integer, found text"),
        ("train.steps=1.5", "train.steps=1.5: expected an integer, found a number"),
        ("train.steps=true", "train.steps=True: expected an integer, found true/false"),
        ("train.grad_clip=high", "train.grad_clip='high': expected a number or null, found text"),
        ("advantage.by_role=1", "advantage.by_role=1: expected true or false, found an integer"),
        (
            "grpo.role_weights=[1]",
            "grpo.role_weights=[1]: expected a list of 2 values (a number, a number), found a list",
        ),
        ("train=fast", "train='fast': expected a section with keys"),
        ("model.name=x", "model={'name': 'x'}: expected text, found a section"),
    ],
)
def test_a_wrong_type_names_key_value_and_expected_type(write, override, message):
    assert refuse(write(MINIMAL), override) == f"command line: {message}"


def test_an_unknown_choice_lists_the_choices(write):
    message = refuse(write(MINIMAL), "world.kind=rehersal")
    assert "world.kind='rehersal'" in message and "did you mean 'rehearsal'?" in message
    assert "rehearsal, external, real, mixed" in message


@pytest.mark.parametrize("override", ["grpo.kl=k9", "grpo.ratio=word", "grpo.aggregate=mean", "grpo.clip_low=-1"])
def test_the_choices_of_the_loss_are_checked_before_anything_runs(write, override):
    assert "grpo" in refuse(write(MINIMAL), override)


def test_a_missing_key_is_named(write):
    assert "missing key 'output_dir'" in refuse(write("model: m\n"))
    assert "output_dir" in refuse(write("model: m\noutput_dir: ???\n"))


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "model: [\n", "a: ${nowhere}\nmodel: m\noutput_dir: o\n"])
def test_a_file_that_is_no_mapping_is_refused_by_name(write, text):
    path = write(text)
    assert refuse(path).startswith(f"{path}: ")


def test_an_absent_file_and_a_bare_word_are_refused(tmp_path, write):
    assert "no such configuration file" in refuse(tmp_path / "absent.yaml")
    assert "expected key=value" in refuse(write(MINIMAL), "train.steps")


@pytest.mark.parametrize("truncation", ["rollout.top_p=0.95", "rollout.top_k=20"])
@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_a_sampler_correction_excludes_truncation(write, truncation, correction):
    path = write(MINIMAL)
    message = refuse(path, truncation, f"grpo.sampler_correction={correction}")
    assert "rollout.top_p=1" in message and "grpo.sampler_correction=none" in message
    load_config(path, [truncation])
    load_config(path, [f"grpo.sampler_correction={correction}"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.updates_per_batch=2"], "train.old_logps"),
        (["train.act=false", "train.rehearse=false"], "train.rehearse"),
        (["train.row_length=100"], "rollout.max_length"),
        (["tasks.kind=checklist"], "tasks.path"),
        (["world.kind=external"], "world.endpoint.base_url"),
        (["rollout.group_size=0"], "rollout.group_size"),
        (["rollout.temperature=0"], "rollout.temperature"),
        (["mesh.data=0"], "mesh.data"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(write, overrides, key):
    assert key in refuse(write(MINIMAL), *overrides)


def test_what_was_saved_loads_back_equal(write, tmp_path):
    config = load_config(write(MINIMAL), ["grpo.role_weights=[1, 0.5]", "train.grad_clip=null", "seed=5"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_resumed_run_may_go_further_elsewhere_but_not_differently(write):
    path = write(MINIMAL)
    old = load_config(path)
    moved = load_config(path, ["train.steps=900", "evaluation.every=5", "mesh.fsdp=4", "logging.print_every=10"])
    assert diff_on_resume(old, moved) == []
    other = load_config(path, ["train.learning_rate=1e-5", "seed=1", "grpo.kl=k3", "rollout.group_size=8"])
    assert diff_on_resume(old, other) == ["grpo.kl", "rollout.group_size", "seed", "train.learning_rate"]


def test_a_key_that_one_side_lacks_counts_as_different(write):
    new = load_config(write(MINIMAL))
    old = to_dict(new)
    del old["world"]["form"]
    assert diff_on_resume(old, new) == ["world.form"]


def test_the_warm_start_has_its_own_schema(write):
    architecture = "architecture: {hidden_size: 64, num_hidden_layers: 2}\ntokenizer: tok\noutput_dir: o\n"
    config = load_config(write(architecture), ["train.steps=5"], SFTConfig)
    assert config.architecture["hidden_size"] == 64 and config.train.steps == 5
    assert "not both" in refuse(write(architecture), "model=m", schema=SFTConfig)
    assert "neither" in refuse(write("output_dir: o\n"), schema=SFTConfig)


def test_a_configuration_cannot_be_changed_in_place():
    config = from_dict(Config, {"model": "m", "output_dir": "o"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_every_shipped_configuration_loads_and_says_how_it_is_launched(root):
    schemas = {"sft": SFTConfig, "train": Config, "rollout": Config}
    for path in sorted((root / "configs").glob("*.yaml")):
        text = path.read_text()
        launched = re.search(rf"^#.*envace (\w+) configs/{path.name}", text, re.M)
        assert launched, f"{path.name}: its first comment must hold the command that launches it"
        if launched.group(1) in schemas:
            load_config(path, schema=schemas[launched.group(1)])


def test_config_errors_are_errors_of_the_user():
    assert issubclass(ConfigError, EnvaceError)
