"""`envace act`: a conversation in the terminal. Private rehearsals show dimmed; what is really done shows in full."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from envace_jax.chat import ToolCall
from envace_jax.errors import ConfigError
from envace_jax.rehearse.commit import (
    Course,
    Decision,
    DryRun,
    Environment,
    Guarded,
    Rehearsal,
    act_turn,
    save_decisions,
)
from envace_jax.rehearse.mcp import MCPEnvironment
from envace_jax.rehearse.memory import spell
from envace_jax.rehearse.plans import ACTOR, Plan, RehearseSettings
from envace_jax.rehearse.policy import Message, Policy, drive
from envace_jax.tasks import Task

_SHOWN = 400  # characters of a result on the screen


def converse(
    policies: Mapping[str, Policy],
    system: Sequence[Message],
    users: Iterator[str],
    tools: Sequence[Mapping[str, Any]],
    environment: Environment,
    settings: RehearseSettings,
    *,
    console: Console,
    allow: Callable[[ToolCall], bool] = lambda call: True,
    record: str | Path | None = None,
    episode: int = 0,
) -> Course:
    """Talk until `users` ends or is interrupted. A user turn that fails is reported, and the conversation goes on.

    record: a file to which every decision is appended, as JSON lines.
    """
    course = Course(list(system))
    for turn, text in enumerate(users):
        console.print(Text(f"user       {text}", style="bold"))
        course.messages.append({"role": "user", "content": text})
        before = len(course.decisions)
        speech = act_turn(
            course,
            tools,
            environment,
            settings,
            policies[ACTOR],
            episode=episode,
            turn=turn,
            allow=allow,
            listen=lambda event: show(event, console),
        )
        try:
            drive(speech, policies)
        finally:
            if record is not None:
                save_decisions(course.decisions[before:], record)
        if course.finish != "done":
            console.print(Text(f"           (the turn ended early: {course.finish})", style="yellow"))
            course.messages.append({"role": "assistant", "content": ""})
    console.print(
        Text(f"sampled {course.plan_tokens} tokens in rehearsal and {course.act_tokens} in acting", style="dim")
    )
    return course


def show(event: Rehearsal | Decision, console: Console) -> None:
    """A rehearsal, dimmed, or what was decided."""
    if isinstance(event, Rehearsal):
        for number, plan in enumerate(event.plans, start=1):
            mark = " ← chosen" if event.chosen == number - 1 else ""
            console.print(Text(f"rehearsal  {event.round}.{number}{mark}", style="dim"))
            for line in _lines(plan):
                console.print(Text(f"           {line}", style="dim"))
    elif event.call is not None:
        console.print(Text(f"call       {spell(event.call)}", style="cyan"))
        style = "yellow" if event.departed or event.withheld else ""
        note = "  (not as rehearsed)" if event.departed else ""
        console.print(Text(f"result     {_short(event.real)}{note}", style=style))
    else:
        console.print(Text(f"assistant  {event.reply}", style="green"))


def typed(console: Console) -> Iterator[str]:
    """What a user types, line by line, to the end of input or an empty line."""
    while True:
        try:
            line = console.input("[bold]you        [/bold]").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def asks_before(read_only: Collection[str], console: Console) -> Callable[[ToolCall], bool]:
    """Asks the user before every call of a tool that is not known to be read-only."""

    def allow(call: ToolCall) -> bool:
        if call.name in read_only:
            return True
        try:
            answer = console.input(f"[bold yellow]allow {spell(call)!r}? (y/N) [/bold yellow]")
        except EOFError:
            return False
        return answer.strip().lower() in ("y", "yes")

    return allow


def mini_task(name: str) -> Task:
    """The task of `mini:SPLIT:INDEX`, the index counted from 0. Raises ConfigError for another name."""
    from envace_jax.tasks.mini import mini_tasks

    parts = name.split(":")
    if len(parts) != 3 or parts[0] != "mini" or not parts[2].isdigit():
        raise ConfigError(f"--task {name}: write mini:SPLIT:INDEX, as in mini:test:17")
    try:
        (task,) = mini_tasks(parts[1], 1, start=int(parts[2]))
    except ValueError as error:
        raise ConfigError(f"--task {name}: {error}") from error
    return task


def act(
    model: str,
    *,
    task: str | None = None,
    mcp: str | None = None,
    mcp_url: str | None = None,
    base: str | None = None,
    settings: RehearseSettings | None = None,
    interactive: bool = False,
    dry_run: bool = False,
    confirm: bool = False,
    timeout_s: float = 60.0,
    max_bytes: int = 20_000,
    max_length: int = 1024,
    seed: int = 0,
    record: str | Path | None = None,
    console: Console | None = None,
    endpoint: str | None = None,
    load: Callable[[str, int, int], Policy] | None = None,
) -> Course:
    """`envace act MODEL`: one task of the embedded world in its real shop, or the tools of an MCP server.

    task: mini:SPLIT:INDEX. mcp: the command of a server, which is spoken to over stdio; mcp_url: of one over HTTP.
    base: another model that answers the calls of rehearsals. interactive: the user turns are typed, not the task's.
    endpoint: of an OpenAI-compatible server, which knows `model` and `base` by name; None: they are directories.
    load: makes a policy of (directory, max_length, seed); None: the local engine, or the endpoint.
    Raises EnvaceError for a model or a task that cannot be used.
    """
    from envace_jax.rehearse.plans import PLANNER, REHEARSER

    if sum(given is not None for given in (task, mcp, mcp_url)) != 1:
        raise ConfigError("give one of --task mini:SPLIT:INDEX, --mcp COMMAND and --mcp-url URL")
    console = console or Console(highlight=False, soft_wrap=True)
    settings = settings or RehearseSettings()
    if load is None:
        load = local_policy if endpoint is None else partial(endpoint_policy, endpoint)
    with ExitStack() as stack:
        if task is not None:
            real, system, users, tools, read_only = _shop(mini_task(task))
        else:
            server = stack.enter_context(MCPEnvironment(command=mcp, url=mcp_url, timeout_s=timeout_s))
            real, system, users, tools, read_only = server, [], None, server.tools, server.read_only
        own = load(model, max_length, seed)
        policies = {ACTOR: own, PLANNER: own, REHEARSER: own if base is None else load(base, max_length, seed)}
        for message in system:
            console.print(Text(message["content"], style="dim"))
        return converse(
            policies,
            system,
            typed(console) if interactive or users is None else iter(users),
            tools,
            DryRun() if dry_run else Guarded(real, timeout_s + 5, max_bytes),
            settings,
            console=console,
            allow=asks_before(read_only, console) if confirm else lambda call: True,
            record=record,
        )


def _shop(task: Task) -> tuple[Environment, list[Message], Sequence[str], Sequence[Mapping[str, Any]], set[str]]:
    from envace_jax.tasks.mini import TOOLS, WRITES, Shop

    system = [m for m in task.prompt if m["role"] == "system"]
    read_only = {t["function"]["name"] for t in TOOLS} - WRITES
    return Shop(task.meta["records"]), system, task.user_turns, task.tools, read_only


def endpoint_policy(url: str, name: str, max_length: int, seed: int) -> Policy:
    """A model behind an endpoint; the key, where one is needed, is in OPENAI_API_KEY."""
    from envace_jax.rehearse.policy import EndpointPolicy

    return EndpointPolicy(url, name, api_key=os.environ.get("OPENAI_API_KEY"), max_tokens=max_length, seed=seed)


def local_policy(directory: str, max_length: int, seed: int) -> Policy:
    """A model directory behind the local engine, without thinking."""
    from envace_jax.chat import ChatTokenizer
    from envace_jax.rehearse.policy import LocalPolicy
    from envace_jax.sampling import Engine
    from envace_jax.train import load_model, tokenizer_directory

    model, chat = load_model(directory), ChatTokenizer.from_pretrained(tokenizer_directory(directory))
    # Few streams: fewer programs to compile are worth more than smaller batches.
    engine = Engine(
        model.config, slots=8, max_length=max_length, vocab_size=chat.vocab_size, min_window=512, compact=False
    )
    return LocalPolicy(engine, model, chat, seed=seed)


def _lines(plan: Plan) -> list[str]:
    calls = [f"{spell(made.call)} → {_short(made.result)}" for made in plan.calls]
    return [*calls, f"ends: {plan.reply if plan.outcome == 'done' else plan.outcome}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
