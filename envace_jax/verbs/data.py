"""`envace data`: task data."""

from typing import Annotated

import typer

from envace_jax.verbs import example

app = typer.Typer(help="Task data: convert, check, count.", no_args_is_help=True, rich_markup_mode="markdown")

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


@app.command(
    epilog=example(
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


@app.command(epilog=example("envace data stats tasks.jsonl --tokenizer models/qwen3_mini"))
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


@app.command(epilog=example("envace data build 'raw/*.parquet' data/tasks --split test=raw_test.jsonl --skip-bad"))
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
