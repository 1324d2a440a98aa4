"""`envace act`: rehearse, then act for real; and the options it shares with `envace evaluate rehearse`."""

from pathlib import Path
from typing import Annotated

import typer

from envace_jax.verbs import example

PlansOption = Annotated[int, typer.Option("--n", help="Private plans before acting; 0: none.", min=0)]
ModeOption = Annotated[str, typer.Option(help="parallel, or sequential: each plan sees the earlier ones.")]
ScopeOption = Annotated[str, typer.Option(help="Rehearse anew for each user turn, or for each call.")]
MemoryOption = Annotated[str, typer.Option(help="context: the actor reads it; vote: the plan most agree on is done.")]
MemoryTokensOption = Annotated[int, typer.Option(help="Budget of the memory; 0: no budget.", min=0)]
CritiqueOption = Annotated[bool, typer.Option(help="Sequential: review each plan before the next.")]
BaseOption = Annotated[str | None, typer.Option(metavar="MODEL", help="Another model that answers rehearsed calls.")]
MaxLengthOption = Annotated[int, typer.Option(help="Tokens of a conversation.", min=64)]


def rehearse_settings(**given):
    from envace_jax.rehearse.plans import RehearseSettings

    tokens = given.pop("memory_tokens")
    return RehearseSettings(memory_tokens=tokens or None, **given)


EPILOG = example(
    "envace act models/qwen3_mini --task mini:test:17",
    "envace act models/qwen3_mini --task mini:test:17 --chat --confirm --n 4 --memory vote",
    "envace act checkpoints/Qwen3-8B --mcp 'uvx mcp-server-time' --confirm",
    "envace act Qwen3-8B --endpoint http://localhost:8000/v1 --mcp-url http://localhost:9000/mcp",
)


def act(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="HF or run directory; a name at an --endpoint.", show_default=False),
    ],
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
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible endpoint where MODEL is served.")
    ] = None,
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
    settings = rehearse_settings(**given, memory_tokens=memory_tokens, act_temperature=temperature)
    from envace_jax.rehearse import chat as terminal

    terminal.act(
        model,
        task=task,
        mcp=mcp,
        mcp_url=mcp_url,
        base=base,
        endpoint=endpoint,
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
