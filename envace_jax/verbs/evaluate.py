"""`envace evaluate`: measure a model."""

from pathlib import Path
from typing import Annotated

import typer

from envace_jax.verbs import example
from envace_jax.verbs.act import (
    BaseOption,
    CritiqueOption,
    MaxLengthOption,
    MemoryOption,
    MemoryTokensOption,
    ModeOption,
    PlansOption,
    ScopeOption,
    rehearse_settings,
)

app = typer.Typer(help="Measure a model.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command(epilog=example("envace evaluate mini models/qwen3_mini --tasks 128"))
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


@app.command(
    epilog=example(
        "envace evaluate fidelity models/qwen3_mini --tasks 64",
        "envace evaluate fidelity models/qwen3_mini --triples calls.jsonl --json",
        "envace evaluate fidelity checkpoints/Qwen3-8B --bfcl base --max-length 16384 --response-tokens 1000",
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
    bfcl: Annotated[
        str | None, typer.Option(metavar="CATEGORY", help="BFCL's executable classes: base, long_context, ...")
    ] = None,
    tasks: Annotated[int, typer.Option(help="How many tasks, or entries of BFCL.", min=1)] = 64,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "test",
    visibility: Annotated[str, typer.Option(help="full or partial.")] = "full",
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    max_length: Annotated[int, typer.Option(help="Calls beyond so many tokens are left out.", min=64)] = 1024,
    response_tokens: Annotated[int, typer.Option(help="Most tokens of a rehearsed response.", min=1)] = 96,
    thinking: Annotated[bool, typer.Option(help="Whether prompts are rendered for thinking.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the result: .png, .svg or .pdf.")] = None,
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
        bfcl=bfcl,
        tasks=tasks,
        split=split,
        visibility=visibility,
        seed=seed,
        max_length=max_length,
        response_tokens=response_tokens,
        thinking=thinking,
        plot=plot,
        as_json=as_json,
        out=out,
    )


@app.command(epilog=example("envace evaluate compare base.json trained.json"))
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result written with --out.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same evaluation.", show_default=False)],
) -> None:
    """What B changes against A, and which of it is beyond noise."""
    from envace_jax.evaluate import results

    results.print_comparison(results.read_result(a), results.read_result(b))


@app.command(
    epilog=example(
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
    settings = rehearse_settings(**given, memory_tokens=memory_tokens)
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
