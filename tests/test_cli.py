"""The command line is thin: it hands a checked configuration to one function, and shows a user's errors as one line."""

import subprocess
import sys
import types

import pytest

from envace_jax import cli
from envace_jax.errors import CheckpointError

VERBS = [
    ["train"],
    ["sft"],
    ["rollout"],
    ["act"],
    ["evaluate", "mini"],
    ["evaluate", "fidelity"],
    ["evaluate", "rehearse"],
    ["evaluate", "compare"],
    ["export"],
    ["import"],
]


@pytest.fixture
def envace(capsys):
    """Runs `envace ARGS`; returns (exit status, stdout, stderr)."""

    def call(*args):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\noutput_dir: o\n")
    return path


@pytest.fixture
def package(monkeypatch):
    """Puts a stand-in for a package in place: `package("train", run=f)`."""

    def put(name, **functions):
        module = types.ModuleType(f"envace_jax.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys.modules["envace_jax"], name, module, raising=False)

    return put


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_explains_itself_with_an_example(envace, verb):
    status, out, _ = envace(*verb, "--help")
    assert status == 0
    assert "Example:" in out and f"envace {' '.join(verb)} " in out.partition("Example:")[2]


def test_help_comes_without_loading_jax():
    program = "import sys, envace_jax.cli; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.fixture
def training(package):
    """Puts a stand-in for training in place: `training(f)` has `envace train` call f(config, evaluation callback)."""

    def put(run):
        package("evaluate", during_training=lambda config: f"measures {config.model}")
        package("train", run=lambda config, *, evaluate: run(config, evaluate))

    return put


def test_train_hands_over_the_file_with_its_overrides_and_an_evaluation(envace, config, training):
    seen = []
    training(lambda *given: seen.append(given))
    assert envace("train", config, "train.steps=3", "seed=7")[0] == 0
    assert [(c.model, c.train.steps, c.seed, e) for c, e in seen] == [("m", 3, 7, "measures m")]


def test_sft_reads_its_own_schema(envace, config, package):
    seen = []
    package("train", sft=seen.append)
    assert envace("sft", config, "data.conversations=10")[0] == 0
    assert seen[0].data.conversations == 10


def test_a_misspelt_key_is_one_line_and_status_2(envace, config, training):
    training(lambda *given: pytest.fail("must not run"))
    status, _, err = envace("train", config, "train.stpes=3")
    assert status == 2
    assert err.strip() == "error: command line: unknown key 'train.stpes'; did you mean 'train.steps'?"


def test_an_error_of_a_package_is_one_line_and_status_2(envace, tmp_path, package):
    def export(source, out, **options):
        raise CheckpointError(f"{source}: no checkpoint [here]")

    package("train", export=export)
    status, _, err = envace("export", "runs/absent", tmp_path / "out")
    assert (status, err.strip()) == (2, "error: runs/absent: no checkpoint [here]")


def test_a_bug_keeps_its_traceback(config, training):
    def run(*given):
        raise ZeroDivisionError("a bug")

    training(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", str(config)])


def test_ctrl_c_is_one_line_and_status_130(envace, config, training):
    def run(*given):
        raise KeyboardInterrupt

    training(run)
    status, _, err = envace("train", config)
    assert (status, err.strip()) == (130, "interrupted")


def test_a_stopped_run_says_so_itself_and_keeps_its_status(envace, config, training):
    def run(*given):
        raise SystemExit(75)

    training(run)
    assert envace("train", config) == (75, "", "")


@pytest.mark.parametrize("args", [["trian"], ["train"], ["evaluate", "moon"], ["train", "a.yaml", "--fast"]])
def test_a_usage_error_is_status_2(envace, args):
    status, _, err = envace(*args)
    assert status == 2 and "Usage: " in err and "Traceback" not in err
