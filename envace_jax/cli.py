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

from envace_jax import __version__
from envace_jax.errors import EnvaceError

app = typer.Typer(
    name="envace",
    help="Train, run and measure agents that rehearse their world.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
evaluate_app = typer.Typer(help="Measure a model.", no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(evaluate_app, name="evaluate")
data_app = typer.Typer(help="Task data: convert, check, count.", no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(data_app, name="data")

ConfigArg = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file.", show_default=False),
]


def _example(command: str, *more: str) -> str:
    lines = "\n\n".join(f"    {line}" for line in (command, *more))
    return f"Example:\n\n{lines}"


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


@app.command(epilog=_example("envace train configs/mini.yaml", "envace train configs/mini.yaml train.steps=20 seed=1"))
def train(config: ConfigArg, overrides: Overrides = None) -> None:
    """Train by role-wise GRPO; resumes by itself when output_dir holds a checkpoint."""
    from envace_jax.config import load_config

    settings = load_config(config, overrides or ())
    from envace_jax import evaluate, train

    train.run(settings, evaluate=evaluate.during_training(settings))


@app.command(epilog=_example("envace sft configs/mini_sft.yaml", "envace sft configs/mini_sft.yaml train.steps=100"))
def sft(config: ConfigArg, overrides: Overrides = None) -> None:
    """Supervised warm start on both roles."""
    from envace_jax import train
    from envace_jax.config import SFTConfig, load_config

    train.sft(load_config(config, overrides or (), SFTConfig))


@app.command(epilog=_example("envace rollout configs/mini.yaml --out episodes.jsonl rollout.tasks_per_step=4"))
def rollout(
    config: ConfigArg,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where the trajectories go.")] = Path("trajectories.jsonl"),
) -> None:
    """Sample one step's episodes to JSONL, no training."""
    from envace_jax import rollout
    from envace_jax.config import load_config

    rollout.run(load_config(config, overrides or ()), out)


@evaluate_app.command(epilog=_example("envace evaluate mini models/qwen3_mini --tasks 128"))
def mini(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="HF directory or run directory.", show_default=False)],
    tasks: Annotated[int, typer.Option(help="How many tasks.", min=1)] = 64,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "test",
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)] = 0.6,
    top_p: Annotated[float, typer.Option(help="Nucleus.", min=0.0, max=1.0)] = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    visibility: Annotated[str, typer.Option(help="full or partial: how much of the orders the prompt shows.")] = "full",
    out: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Success in the mini world's real environment, and how true rehearsals are to it."""
    from envace_jax import evaluate

    evaluate.mini(
        model,
        tasks=tasks,
        split=split,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        visibility=visibility,
        as_json=as_json,
        out=out,
    )


@evaluate_app.command(
    epilog=_example(
        "envace evaluate fidelity models/qwen3_mini --tasks 64",
        "envace evaluate fidelity models/qwen3_mini --triples calls.jsonl --json",
        "envace evaluate fidelity --floors calls.json --json",
    )
)
def fidelity(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="HF directory or run directory.", show_default=False)
    ] = None,
    floors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="No model: what these calls need none for.")
    ] = None,
    category: Annotated[str | None, typer.Option(help="Of the calls in --floors; the file's first by default.")] = None,
    triples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL of tools, history, call, response.")
    ] = None,
    tasks: Annotated[int, typer.Option(help="How many tasks of the embedded world.", min=1)] = 64,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "test",
    visibility: Annotated[str, typer.Option(help="full or partial.")] = "full",
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    max_length: Annotated[int, typer.Option(help="Calls beyond so many tokens are left out.", min=64)] = 1024,
    response_tokens: Annotated[int, typer.Option(help="Most tokens of a rehearsed response.", min=1)] = 96,
    thinking: Annotated[bool, typer.Option(help="Whether prompts are rendered for thinking.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How true rehearsed responses are: teacher-forced, in closed loop, and beside floors without a model."""
    if (model is None) == (floors is None):
        raise typer.BadParameter("give MODEL to measure a model, or --floors FILE to measure none")
    from envace_jax.evaluate import fidelity

    if floors is not None:
        fidelity.print_floors(floors, category=category, as_json=as_json)
        return
    fidelity.fidelity(
        model,
        triples=triples,
        tasks=tasks,
        split=split,
        visibility=visibility,
        seed=seed,
        max_length=max_length,
        response_tokens=response_tokens,
        thinking=thinking,
        as_json=as_json,
        out=out,
    )


@evaluate_app.command(epilog=_example("envace evaluate compare base.json trained.json"))
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result written with --out.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same evaluation.", show_default=False)],
) -> None:
    """What B changes against A, and which of it is beyond noise."""
    from envace_jax.evaluate import results

    results.print_comparison(results.read_result(a), results.read_result(b))


PlansOption = Annotated[int, typer.Option("--n", help="Private plans before acting; 0: none.", min=0)]
ModeOption = Annotated[str, typer.Option(help="parallel, or sequential: each plan sees the earlier ones.")]
ScopeOption = Annotated[str, typer.Option(help="Rehearse anew for each user turn, or for each call.")]
MemoryOption = Annotated[str, typer.Option(help="context: the actor reads it; vote: the plan most agree on is done.")]
MemoryTokensOption = Annotated[int, typer.Option(help="Budget of the memory; 0: no budget.", min=0)]
CritiqueOption = Annotated[bool, typer.Option(help="Sequential: review each plan before the next.")]
BaseOption = Annotated[str | None, typer.Option(metavar="MODEL", help="Another model that answers rehearsed calls.")]
MaxLengthOption = Annotated[int, typer.Option(help="Tokens of a conversation.", min=64)]


def _rehearse_settings(**given):
    from envace_jax.rehearse.plans import RehearseSettings

    tokens = given.pop("memory_tokens")
    return RehearseSettings(memory_tokens=tokens or None, **given)


@app.command(
    epilog=_example(
        "envace act models/qwen3_mini --task mini:test:17 --memory vote",
        "envace act models/qwen3_mini --task mini:test:17 --chat --confirm --n 4 --memory vote",
        "envace act Qwen3-8B --mcp 'uvx mcp-server-time' --confirm",
    )
)
def act(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="HF directory or run directory.", show_default=False)],
    task: Annotated[str | None, typer.Option(help="mini:SPLIT:INDEX, a task of the embedded world.")] = None,
    mcp: Annotated[str | None, typer.Option(metavar="COMMAND", help="Tools of an MCP server over stdio.")] = None,
    mcp_url: Annotated[str | None, typer.Option(metavar="URL", help="Tools of an MCP server over HTTP.")] = None,
    n: PlansOption = 2,
    mode: ModeOption = "parallel",
    scope: ScopeOption = "turn",
    memory: MemoryOption = "context",
    memory_tokens: MemoryTokensOption = 1000,
    critique: CritiqueOption = True,
    base: BaseOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Type the user's messages instead of the task's.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Rehearse and decide, but execute nothing.")] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Ask before tools that are not read-only.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds a real call may take.", min=0.1)] = 60.0,
    max_bytes: Annotated[int, typer.Option(help="Longest real result.", min=100)] = 20_000,
    max_length: MaxLengthOption = 1024,
    temperature: Annotated[float, typer.Option(help="Of the actor; rehearsals are sampled at 1.", min=0.0)] = 0.6,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    record: Annotated[Path | None, typer.Option(help="Append every decision there, as JSON lines.")] = None,
) -> None:
    """Rehearse in private, then act in a real environment; rehearsals show dimmed."""
    given = {"plans": n, "mode": mode, "scope": scope, "memory": memory, "critique": critique}
    settings = _rehearse_settings(**given, memory_tokens=memory_tokens, act_temperature=temperature)
    from envace_jax.rehearse import chat as terminal

    terminal.act(
        model,
        task=task,
        mcp=mcp,
        mcp_url=mcp_url,
        base=base,
        settings=settings,
        interactive=chat,
        dry_run=dry_run,
        confirm=confirm,
        timeout_s=timeout,
        max_bytes=max_bytes,
        max_length=max_length,
        seed=seed,
        record=record,
    )


@evaluate_app.command(
    epilog=_example(
        "envace evaluate rehearse models/qwen3_mini --tasks 500 --n 2 --memory vote --out parallel2.json",
        "envace evaluate rehearse models/qwen3_mini --base models/beginner --n 2 --memory vote",
    )
)
def rehearse(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="HF directory or run directory.", show_default=False)],
    tasks: Annotated[int, typer.Option(help="How many tasks.", min=1)] = 64,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "test",
    visibility: Annotated[str, typer.Option(help="full or partial.")] = "full",
    n: PlansOption = 2,
    mode: ModeOption = "parallel",
    scope: ScopeOption = "turn",
    memory: MemoryOption = "context",
    memory_tokens: MemoryTokensOption = 1000,
    critique: CritiqueOption = True,
    base: BaseOption = None,
    base_plays: Annotated[
        str, typer.Option(help="What --base does: rehearser, or planner (whole plans).")
    ] = "rehearser",
    max_length: MaxLengthOption = 1024,
    temperature: Annotated[float, typer.Option(help="Of the actor; rehearsals are sampled at 1.", min=0.0)] = 0.6,
    top_p: Annotated[float, typer.Option(help="Nucleus of the actor.", min=0.0, max=1.0)] = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    decisions: Annotated[Path | None, typer.Option(help="Write every decision there, as JSON lines.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What rehearsal at test time is worth in the mini world, and what it costs."""
    given = {"plans": n, "mode": mode, "scope": scope, "memory": memory, "critique": critique}
    given |= {"act_temperature": temperature, "act_top_p": top_p}
    settings = _rehearse_settings(**given, memory_tokens=memory_tokens)
    from envace_jax.evaluate import rehearsing

    rehearsing.rehearsal(
        model,
        base=base,
        base_plays=base_plays,
        tasks=tasks,
        split=split,
        visibility=visibility,
        seed=seed,
        settings=settings,
        max_length=max_length,
        decisions=decisions,
        as_json=as_json,
        out=out,
    )


TaskFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="JSON, JSONL or parquet (a path, a URL, or a pattern in quotes), or a TFDS directory.",
        show_default=False,
    ),
]
SplitOption = Annotated[str, typer.Option(help="Which split of a TFDS directory.")]
TokenizerOption = Annotated[str | None, typer.Option(metavar="HF_DIR", help="Count tokens with this tokenizer.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Reject longer first prompts; needs --tokenizer.")]
ThinkingOption = Annotated[bool, typer.Option(help="Whether prompts are rendered for thinking.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@data_app.command(
    epilog=_example(
        "envace data check tasks.jsonl --json",
        "envace data check 'data/*.parquet' --tokenizer Qwen3-8B --max-prompt-tokens 4000",
    )
)
def check(
    file: TaskFile,
    as_json: JsonOption = False,
    tokenizer: TokenizerOption = None,
    max_prompt_tokens: LimitOption = None,
    thinking: ThinkingOption = True,
    split: SplitOption = "train",
) -> None:
    """Name every record that is not a task, with its line and the reason.

    The exit status is 0 when all records are accepted, 1 when some are rejected, 2 when FILE cannot be read.
    """
    from envace_jax.tasks import commands

    settings = {"split": split, "tokenizer": tokenizer, "max_prompt_tokens": max_prompt_tokens, "thinking": thinking}
    raise typer.Exit(commands.run_check(file, as_json=as_json, **settings))


@data_app.command(epilog=_example("envace data stats tasks.jsonl --tokenizer models/qwen3_mini"))
def stats(
    file: TaskFile,
    as_json: JsonOption = False,
    tokenizer: TokenizerOption = None,
    max_prompt_tokens: LimitOption = None,
    thinking: ThinkingOption = True,
    split: SplitOption = "train",
) -> None:
    """Count turns, tools, checklist items, weights and tokens of the tasks that are accepted."""
    from envace_jax.tasks import commands

    settings = {"split": split, "tokenizer": tokenizer, "max_prompt_tokens": max_prompt_tokens, "thinking": thinking}
    raise typer.Exit(commands.run_stats(file, as_json=as_json, **settings))


@data_app.command(
    epilog=_example("envace data build 'raw/*.parquet' data/tasks --split test=raw_test.jsonl --skip-bad")
)
def build(
    source: TaskFile,
    out: Annotated[str, typer.Argument(metavar="OUT", help="New directory (or bucket path).", show_default=False)],
    split: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="One more split; FILE is the split `train`.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option(help="Leave records out that are not tasks, instead of stopping.")] = False,
) -> None:
    """Convert tasks to a TFDS data set (ArrayRecord) once, to be read at random by training runs."""
    from envace_jax.tasks import commands

    raise typer.Exit(commands.run_build(source, out, further=split or (), skip_bad=skip_bad))


@app.command(epilog=_example("envace export runs/mini exported/mini"))
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or a checkpoint.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New HF directory.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Turn a checkpoint into a Hugging Face directory that vLLM, SGLang and transformers read."""
    from envace_jax import train

    train.export(source, out, dtype=dtype)


@app.command("import", epilog=_example("envace import Qwen3-8B checkpoints/qwen3-8b"))
def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="HF directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New checkpoint directory.", show_default=False)],
) -> None:
    """Turn a Hugging Face directory into a checkpoint."""
    from envace_jax import train

    train.import_hf(source, out)


@app.command(
    "compile",
    epilog=_example(
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


if __name__ == "__main__":
    main()
