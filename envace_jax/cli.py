"""`envace`: the command line. Thin: each verb reads its configuration and calls one function of one package.

Packages are imported inside the verb, so that `--help` and configuration errors come at once, without loading jax
kernels. An error that a user can mend is one red line and exit status 2; Ctrl-C is one line and 130.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from envace_jax import __version__, huge_pages
from envace_jax.errors import EnvaceError
from envace_jax.verbs import act, data, evaluate, example

app = typer.Typer(
    name="envace",
    help="Train, run and measure agents that rehearse their world.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(evaluate.app, name="evaluate")
app.add_typer(data.app, name="data")

ConfigArg = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file.", show_default=False),
]

Coordinator = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", envvar="ENVACE_COORDINATOR", help="Where process 0 listens.")
]
Processes = Annotated[int | None, typer.Option(envvar="ENVACE_PROCESSES", help="How many there are.", min=1)]
Process = Annotated[int | None, typer.Option(envvar="ENVACE_PROCESS", help="This one's number.", min=0)]
Distributed = Annotated[
    bool, typer.Option("--distributed", envvar="ENVACE_DISTRIBUTED", help="Find the others by the environment.")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"envace {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    # Orbax remarks through absl on what is as it should be.
    logging.getLogger("absl").setLevel(logging.ERROR)
    # Compiled programs are kept between runs; the variable must be set before jax is imported.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envace-jax" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")  # many small programs make a slow start


@app.command(epilog=example("envace train configs/mini.yaml", "envace train configs/mini.yaml train.steps=20 seed=1"))
def train(
    config: ConfigArg,
    overrides: Overrides = None,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: Process = None,
    distributed: Distributed = False,
) -> None:
    """Train by role-wise GRPO; resumes by itself when output_dir holds a checkpoint.

    On several hosts: the same command on each, told of the others by options, by variables, or by a TPU slice or SLURM.
    """
    from envace_jax.config import load_config

    settings = load_config(config, overrides or ())
    from envace_jax.train import start

    start.connect(coordinator, processes, process, search=distributed, faults=settings.faults)
    from envace_jax import evaluate, train

    train.run(settings, evaluate=evaluate.during_training(settings))


@app.command(epilog=example("envace sft configs/mini_sft.yaml", "envace sft configs/mini_sft.yaml train.steps=100"))
def sft(
    config: ConfigArg,
    overrides: Overrides = None,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: Process = None,
    distributed: Distributed = False,
) -> None:
    """Supervised warm start on both roles; on several hosts as `envace train`."""
    from envace_jax.config import SFTConfig, load_config

    settings = load_config(config, overrides or (), SFTConfig)
    from envace_jax.train import start

    start.connect(coordinator, processes, process, search=distributed, faults=settings.faults)
    from envace_jax import train

    train.sft(settings)


@app.command(epilog=example("envace rollout configs/mini.yaml --out episodes.jsonl rollout.tasks_per_step=4"))
def rollout(
    config: ConfigArg,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where the trajectories go.")] = Path("trajectories.jsonl"),
) -> None:
    """Sample one step's episodes to JSONL, no training."""
    from envace_jax import rollout
    from envace_jax.config import load_config

    rollout.run(load_config(config, overrides or ()), out)


app.command(epilog=act.EPILOG)(act.act)


@app.command(epilog=example("envace export runs/mini exported/mini"))
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or a checkpoint.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New HF directory.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    max_shard_size: Annotated[str, typer.Option(help="Of a weight file, such as 500MB.")] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read it back and compare every tensor, and logits.")
    ] = False,
) -> None:
    """Turn a checkpoint into a Hugging Face directory that vLLM, SGLang and transformers read."""
    from envace_jax import train

    train.export(source, out, dtype=dtype, max_shard_size=max_shard_size, verify=verify, say=print)


@app.command("import", epilog=example("envace import Qwen3-8B checkpoints/qwen3-8b"))
def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="HF directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New checkpoint directory.", show_default=False)],
) -> None:
    """Turn a Hugging Face directory into a checkpoint."""
    from envace_jax import train

    train.import_hf(source, out)


@app.command(
    "compile",
    epilog=example(
        "envace compile configs/tpu_8b.yaml --topology v5p:2x4x4",
        "envace compile configs/tpu_8b.yaml --topology v6e-32 --json mesh.tp=2",
    ),
)
def compile_(
    config: ConfigArg,
    overrides: Overrides = None,
    topology: Annotated[
        str, typer.Option(help="v5e, v5p or v6e with a shape (v5p:2x4x4) or a product name (v5p-64).")
    ] = "v5p:2x4x4",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    proposal: Annotated[bool, typer.Option(help="When it does not fit, compile others until one does.")] = True,
) -> None:
    """Find out whether a run fits a TPU slice, on a machine without one.

    The exit status is 0 when it fits, 1 when not (what would is then said), 2 when something in CONFIG is wrong.
    Needs the `tpu-compile` extra.
    """
    # The compiler works for a TPU that is not there; this process itself computes nothing.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else jax, on import, asks a metadata server that is not there
    from envace_jax.config import load_config

    settings = load_config(config, overrides or ())
    from launch import compile

    raise typer.Exit(compile.run(settings, topology, as_json=as_json, proposal=proposal))


def main(args: list[str] | None = None) -> None:
    """Entry point of `envace`; always ends by `SystemExit`."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        status = app(args=args, standalone_mode=False) or 0
    except EnvaceError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception as error:
        # A usage error (unknown verb or option) knows how to show itself; its class has moved between typer's versions.
        if not (hasattr(error, "show") and hasattr(error, "exit_code")):
            raise
        error.show()
        status = error.exit_code
    if status == 130:  # typer turns Ctrl-C into this status, silently
        console.print("interrupted", style="yellow")
    sys.exit(status)


def run() -> None:
    """The program `envace`: `main` with huge pages."""
    huge_pages.use()
    main()


if __name__ == "__main__":
    run()
