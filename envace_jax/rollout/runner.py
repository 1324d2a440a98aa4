"""Rollout of one step: tasks in, trajectories out, by whichever path the settings name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from envace_jax.chat import ChatTokenizer
from envace_jax.config import RolloutConfig
from envace_jax.rewards import Judge, RuleJudge
from envace_jax.rollout.episode import Episode, Rules
from envace_jax.rollout.fused import fits_fused, run_fused
from envace_jax.rollout.hosted import run_hosted
from envace_jax.rollout.simulator import Simulator
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.rollout.worlds import RehearsalWorld, World
from envace_jax.sampling import Budgets, Engine, Grammar, SamplingParams, sequence_keys
from envace_jax.tasks import Task
from models.qwen3 import Qwen3


def make_rules(
    chat: ChatTokenizer,
    settings: RolloutConfig,
    *,
    judge: Judge | None = None,
    empty_penalty: float = 0.1,
    history_reasoning: str = "keep",
    simulator: Simulator | None = None,
) -> Rules:
    """The rules of episodes under `settings`; without a judge, items are answered by their own rules."""
    budgets = Budgets(settings.turn_tokens, settings.response_tokens, settings.max_turns, settings.max_length)
    grammar = Grammar.from_chat(chat, budgets, enable_thinking=settings.thinking)
    return Rules(chat, grammar, judge or RuleJudge(), settings.thinking, empty_penalty, history_reasoning, simulator)


def run_episodes(
    engine: Engine,
    model: Qwen3,
    chat: ChatTokenizer,
    tasks: Sequence[Task],
    *,
    settings: RolloutConfig,
    world: World | None = None,
    seed: int = 0,
    step: int = 0,
    group_size: int | None = None,
    first_episode: int = 0,
    first_group: int = 0,
    judge: Judge | None = None,
    judge_pool: Executor | None = None,
    empty_penalty: float = 0.1,
    history_reasoning: str = "keep",
    temperature: float | Sequence[float] | None = None,
    rehearser: Qwen3 | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trajectory]:
    """`group_size` episodes of every task, in order: those of task i have group `first_group + i`.

    An episode is one trajectory; where the policy rehearses under prompts of their own, each rehearsal is one more,
    behind the actor's and with its number.

    Args:
        engine: at least `settings.max_length` long; it may have fewer slots than there are episodes.
        settings: sampling, budgets, path (`engine`) and, unless `group_size` is given, the group size.
        world: where responses come from; None: the policy rehearses.
        seed, step, first_episode: episode j (from `first_episode` on) draws with `sequence_key(seed, step, j)`.
        judge: of user turns; None: the rules that checklist items carry.
        judge_pool: where verdicts are waited for while other episodes go on; None: judged at once.
        history_reasoning: `world.history_reasoning`; episodes of several user turns are hosted where it is "drop".
        temperature: instead of that of the settings; 0 is greedy. Several: one for each member of a group; such
            episodes are hosted.
        rehearser: the parameters that rehearse, where they are not `model`.
        progress: called with the numbers of finished and of all episodes.

    Raises ValueError when episodes may outgrow the engine's slots, or temperatures and group size differ in number.
    """
    if settings.max_length > engine.max_length:
        raise ValueError(
            f"rollout.max_length={settings.max_length} exceeds the engine's max_length={engine.max_length}"
        )
    size = settings.group_size if group_size is None else group_size
    world = (RehearsalWorld() if world is None else world).at(seed, step)
    rules = make_rules(
        chat,
        settings,
        judge=judge,
        empty_penalty=empty_penalty,
        history_reasoning=history_reasoning,
        simulator=world.simulator,
    )
    episodes: list[Episode] = []
    for task in tasks:
        prompt = rules.prompt(task)
        for _ in range(size):
            responder = world.open(task, first_episode + len(episodes))
            episodes.append(Episode(rules, task, responder, prompt=prompt))
    numbers = range(first_episode, first_episode + len(episodes))
    if temperature is None or isinstance(temperature, (int, float)):
        temperature = [settings.temperature if temperature is None else temperature] * size
    if len(temperature) != size:
        raise ValueError(f"{len(temperature)} temperatures for groups of {size}: give one for each member")
    params = [SamplingParams(heat, settings.top_p, settings.top_k) for heat in temperature] * len(tasks)
    alike = settings.engine == "fused" and len(set(params)) == 1
    # Episodes that need the host cannot run inside the loop, so they are hosted whatever the settings say.
    inside = [i for i, episode in enumerate(episodes) if alike and fits_fused(episode)]
    outside = sorted(set(range(len(episodes))) - set(inside))
    hosted = partial(run_hosted, endpoint=world.endpoint)
    for path, chosen, before in ((run_fused, inside, 0), (hosted, outside, len(inside))):
        if not chosen:
            continue
        path(
            engine,
            model,
            [episodes[i] for i in chosen],
            lambda of, sequence, chosen=chosen: sequence_keys(seed, step, [numbers[chosen[i]] for i in of], sequence),
            [params[i] for i in chosen],
            look_every=settings.look_every,
            judge_pool=judge_pool,
            rehearser=rehearser,
            progress=None if progress is None else lambda done, before=before: progress(before + done, len(episodes)),
        )
    return [
        trajectory
        for i, (episode, number) in enumerate(zip(episodes, numbers, strict=True))
        for trajectory in episode.trajectories(group=first_group + i // size, trajectory=number)
    ]
