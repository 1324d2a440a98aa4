"""The schema of a run: one frozen dataclass per section, the defaults of the paper's release where it states them.

A field's type is its check: `Literal` lists the choices, `X | None` allows null. Relations between fields are checked
in `__post_init__`, which raises `ConfigError`. Lengths are in tokens.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from envace_jax.errors import ConfigError
from envace_jax.grpo import GRPOConfig


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or value > 0, f"{section}.{name} must be positive, found {value}")


def _require_directory(output_dir: str) -> None:
    _require(
        "://" not in output_dir,
        f"output_dir={output_dir} must be a directory; checkpoints may lie in a bucket: set train.checkpoints",
    )


@dataclass(frozen=True)
class EndpointConfig:
    """An OpenAI-compatible chat endpoint: a judge or an external simulator."""

    base_url: str | None = None
    model: str | None = None
    api_key_env: str = "OPENAI_API_KEY"  # the variable's name: keys never stand in a configuration
    temperature: float = 0.6
    top_p: float = 0.8
    max_new_tokens: int = 6000
    timeout_s: float = 120.0
    tries: int = 5
    max_in_flight: int = 500


@dataclass(frozen=True)
class TasksConfig:
    """Which tasks the run draws from."""

    kind: Literal["mini", "checklist"] = "mini"  # the embedded world, or checklist records from files
    path: str | None = None  # JSON, parquet or TFDS directory; needed by `checklist`
    split: str = "train"
    visibility: Literal["full", "partial"] = "full"  # mini: how much of the world's state the prompt shows
    size: int | None = None  # how many tasks; null: all there are
    seed: int = 0
    skip_bad: bool = False  # leave unreadable records out (counted) and go on
    max_prompt_tokens: int | None = 4000  # tasks whose first prompt is longer are left out

    def __post_init__(self) -> None:
        _require(self.kind != "checklist" or self.path is not None, "tasks.path must be set when tasks.kind=checklist")
        _require_positive("tasks", self, "size", "max_prompt_tokens")


@dataclass(frozen=True)
class WorldConfig:
    """Where the response to a tool call comes from, and what of the past stays in view."""

    kind: Literal["rehearsal", "external", "real", "mixed"] = "rehearsal"
    form: Literal["inline", "simulator"] = "inline"
    history_reasoning: Literal["keep", "drop"] = "keep"
    # What the prompt of a rehearsal shows beside the call; `simulator` form and `external` only.
    whitelist: bool = True  # the schemas of all tools of the task
    reference_results: bool = False  # the recorded calls and results
    history: bool = True  # the conversation so far
    raw_message: bool = True  # the actor's message as it was sampled
    split_parameters: bool = False  # rehearsal: a second copy of the policy rehearses, with an optimizer of its own
    real_fraction: float = 0.5  # mixed: share of the responses that come from the real world
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)  # external: who simulates

    def __post_init__(self) -> None:
        _require(0.0 <= self.real_fraction <= 1.0, f"world.real_fraction is a share, found {self.real_fraction}")
        _require(
            self.kind != "external" or self.endpoint.base_url is not None,
            "world.endpoint.base_url must be set when world.kind=external",
        )
        # In the inline form the actor would see what is meant for the rehearser.
        _require(
            not self.reference_results or self.form == "simulator" or self.kind == "external",
            "world.reference_results=true needs a prompt of its own: set world.form=simulator",
        )
        _require(
            not self.split_parameters or self.kind in ("rehearsal", "mixed"),
            f"world.split_parameters=true needs a policy that rehearses, not world.kind={self.kind}",
        )
        _require_positive("world.endpoint", self.endpoint, "max_new_tokens", "timeout_s", "tries", "max_in_flight")


@dataclass(frozen=True)
class RolloutConfig:
    """How episodes are sampled."""

    group_size: int = 4  # episodes per task
    tasks_per_step: int = 16
    max_refills: int = 0  # dynamic sampling: how often groups without signal are replaced by others; 0: they stay
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    thinking: bool = True
    max_turns: int = 30  # assistant turns per episode
    max_length: int = 20000  # episode, prompt included
    turn_tokens: int = 8000  # one act generation
    response_tokens: int = 2000  # one rehearse generation
    engine: Literal["hosted", "fused"] = "fused"
    slots: int | None = None  # rows of the KV cache, over all processes; null: one per episode of a step
    look_every: int = 64  # fused: tokens between two looks of the host
    compile_ahead: bool = False  # all programs of a kind at the first need of one, so that no later step has to

    def __post_init__(self) -> None:
        _require_positive(
            "rollout",
            self,
            "group_size",
            "tasks_per_step",
            "max_turns",
            "max_length",
            "turn_tokens",
            "response_tokens",
            "slots",
            "look_every",
        )
        _require(self.temperature > 0, f"rollout.temperature must be positive, found {self.temperature}")
        _require(0 < self.top_p <= 1, f"rollout.top_p must lie in (0, 1], found {self.top_p}")
        _require(self.max_refills >= 0, f"rollout.max_refills must not be negative, found {self.max_refills}")
        _require(self.top_k >= 0, f"rollout.top_k must be 0 (off) or positive, found {self.top_k}")

    @property
    def truncates(self) -> bool:
        """Whether top-p or top-k cut the sampling distribution."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True)
class RewardConfig:
    """How an episode is scored."""

    judge: EndpointConfig = field(default_factory=EndpointConfig)  # of checklist items without a rule
    endpoints: tuple[str, ...] = ()  # further base URLs that serve the judge's model, asked in turn
    cache: str | None = None  # file of verdicts; null: verdicts.jsonl in the run directory
    max_unjudged_fraction: float = 0.2  # of a step's episodes; with more of them without a verdict the run stops
    empty_penalty: float = 0.1  # taken from an empty generation's own reward
    # Episodes cut by a length budget: learned from as they are, left out, or their reward falls towards the budget.
    overlong: Literal["keep", "mask", "shape"] = "keep"
    overlong_buffer: int = 4096  # shape: tokens before rollout.max_length over which the reward falls by 1

    def __post_init__(self) -> None:
        _require_positive("reward.judge", self.judge, "max_new_tokens", "timeout_s", "tries", "max_in_flight")
        _require(
            0 <= self.max_unjudged_fraction <= 1,
            f"reward.max_unjudged_fraction is a share, found {self.max_unjudged_fraction}",
        )
        _require_positive("reward", self, "overlong_buffer")


@dataclass(frozen=True)
class AdvantageConfig:
    """The arguments of `envace_jax.grpo.role_advantages`."""

    baseline: Literal["trajectory", "generation"] = "trajectory"
    by_role: bool = True
    scale_by_std: bool = False
    leave_one_out: bool = False


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and how a batch is cut to fit; shared by both kinds of training."""

    steps: int = 470
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = "adamw"
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    grad_clip: float | None = 1.0  # global norm; null: off
    micro_batch: int = 8  # rows per forward and backward pass, on each data shard
    row_length: int | None = None  # width of a packed row; null: the longest episode allowed
    # What the backward pass computes again: true is `layer`, false is `none`; see models/qwen3.
    remat: Literal["none", "layer", "dots", "offload"] | bool = True
    attention_block: int = 512  # queries and keys at a time of splash attention (TPU)
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 elsewhere
    save_every: int = 10  # steps between checkpoints
    keep: int | None = 3  # checkpoints kept; null: all
    checkpoints: str | None = None  # where they lie: a directory or gs://BUCKET/NAME; null: in the run directory

    def __post_init__(self) -> None:
        _require(
            "://" not in (self.checkpoints or "") or self.checkpoints.startswith("gs://"),
            f"train.checkpoints={self.checkpoints}: expected a directory or gs://BUCKET/NAME",
        )
        _require_positive("train", self, "steps", "learning_rate", "grad_clip", "micro_batch", "row_length")
        _require_positive("train", self, "save_every", "keep")
        _require(
            self.attention_block > 0 and self.attention_block % 128 == 0,
            f"train.attention_block must be a multiple of 128, found {self.attention_block}",
        )
        _require(self.warmup_steps >= 0, f"train.warmup_steps must not be negative, found {self.warmup_steps}")

    @property
    def remat_policy(self) -> str:
        """What the backward pass computes again, by the name it has in models/qwen3."""
        return {True: "layer", False: "none"}.get(self.remat, self.remat)


@dataclass(frozen=True)
class TrainConfig(OptimConfig):
    """Reinforcement learning: the optimizer's settings and where the old log-probabilities come from."""

    old_logps: Literal["current", "recompute", "sampler"] = "current"
    updates_per_batch: int = 1  # optimizer steps, each on the whole batch
    act: bool = True  # false: what the acting role sampled is not trained
    rehearse: bool = True  # false: what the rehearsal role sampled is not trained

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("train", self, "updates_per_batch")
        _require(self.act or self.rehearse, "train.act and train.rehearse are both false: nothing would be trained")
        _require(
            self.old_logps != "current" or self.updates_per_batch == 1,
            "train.old_logps=current is exact at one update per batch only: "
            "set train.old_logps=recompute or train.updates_per_batch=1",
        )


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the device mesh's axes."""

    data: int = -1  # -1, here or at one of the others: all devices that the other axes leave
    fsdp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        sizes = {"data": self.data, "fsdp": self.fsdp, "tp": self.tp}
        for axis, size in sizes.items():
            _require(size == -1 or size > 0, f"mesh.{axis} must be -1 (the rest) or positive, found {size}")
        rest = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
        _require(len(rest) < 2, f"only one of {', '.join(rest)} can be -1 (the rest): set the others")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation during training."""

    every: int = 0  # steps between evaluations; 0: never
    tasks: int = 64
    split: str = "test"
    temperature: float = 0.6
    top_p: float = 0.95

    def __post_init__(self) -> None:
        _require(self.every >= 0, f"evaluation.every must be 0 (never) or positive, found {self.every}")
        _require_positive("evaluation", self, "tasks", "top_p")
        _require(self.temperature >= 0, f"evaluation.temperature must not be negative, found {self.temperature}")


@dataclass(frozen=True)
class LoggingConfig:
    """What a run writes beside its checkpoints."""

    tensorboard: bool = True
    trajectories_every: int = 10  # steps between trajectory dumps; 0: never
    print_every: int = 1
    profile: tuple[int, int] | None = None  # first and last step of a jax.profiler trace, under profile/
    peak_flops: float | None = None  # of a chip, FLOP/s, for its utilisation; null: by the kind of device, where known

    def __post_init__(self) -> None:
        _require(self.trajectories_every >= 0, "logging.trajectories_every must be 0 (never) or positive")
        _require_positive("logging", self, "print_every", "peak_flops")
        _require(
            self.profile is None or 1 <= self.profile[0] <= self.profile[1],
            f"logging.profile={self.profile}: expected the first and the last step, counted from 1",
        )


@dataclass(frozen=True)
class FaultsConfig:
    """How long a run bears with what does not come: other processes, and the store of its checkpoints."""

    start_s: float = 50.0  # for all processes to come together
    wait_s: float = 1800.0  # for the slowest process, within a step
    heartbeat_s: float = 100.0  # without a sign of life, before a process counts as gone
    saves_behind: int = 3  # checkpoints in a row that may fail before the run stops

    def __post_init__(self) -> None:
        _require_positive("faults", self, "start_s", "wait_s", "heartbeat_s", "saves_behind")


@dataclass(frozen=True)
class Config:
    """A reinforcement-learning run: `envace train`, `envace rollout`."""

    model: str  # HF directory; a preset name where no weights are needed
    output_dir: str
    seed: int = 0
    tasks: TasksConfig = field(default_factory=TasksConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        _require_directory(self.output_dir)
        _require(
            self.reward.overlong != "shape" or self.reward.overlong_buffer <= self.rollout.max_length,
            f"reward.overlong_buffer={self.reward.overlong_buffer} must not exceed "
            f"rollout.max_length={self.rollout.max_length}",
        )
        # The correction compares full distributions; a truncated sampler drew from another one.
        _require(
            self.grpo.sampler_correction == "none" or not self.rollout.truncates,
            f"grpo.sampler_correction={self.grpo.sampler_correction} needs the full sampling distribution: "
            "set rollout.top_p=1 and rollout.top_k=0, or grpo.sampler_correction=none",
        )
        _require(
            self.grpo.sampler_correction == "none" or self.train.old_logps != "sampler",
            f"grpo.sampler_correction={self.grpo.sampler_correction} is always 1 with train.old_logps=sampler: "
            "set train.old_logps=current or recompute, or grpo.sampler_correction=none",
        )
        _require(
            self.train.row_length is None or self.train.row_length >= self.rollout.max_length,
            f"train.row_length={self.train.row_length} is shorter than an episode may be: "
            f"raise it to rollout.max_length={self.rollout.max_length}, or lower that",
        )


@dataclass(frozen=True)
class SFTDataConfig:
    """What the warm start imitates: recorded conversations, both roles."""

    kind: Literal["mini", "jsonl"] = "mini"  # the embedded world's demonstrations and drills, or tasks from a file
    path: str | None = None  # needed by `jsonl`: checklist tasks, whose recorded conversations are imitated
    seed: int = 0
    thinking: bool = True
    conversations: int = 16  # in each step
    max_tokens: int = 4096  # longer conversations are left out
    reading_steps: int = 0  # mini: steps of reading records out, before anything else
    drill_steps: int = 0  # mini: the step at which demonstrations begin; drills (runs of random calls) before it
    drill_fraction: float = 0.5  # mini: drills among the conversations after that
    memory_fraction: float = 0.0  # mini: demonstrations that have a rehearsal memory in context

    def __post_init__(self) -> None:
        _require(self.kind != "jsonl" or self.path is not None, "data.path must be set when data.kind=jsonl")
        _require_positive("data", self, "conversations", "max_tokens")
        _require(self.reading_steps >= 0, f"data.reading_steps must not be negative, found {self.reading_steps}")
        _require(self.drill_steps >= 0, f"data.drill_steps must not be negative, found {self.drill_steps}")
        for name in ("drill_fraction", "memory_fraction"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"data.{name} must lie in 0..1, found {value}")


@dataclass(frozen=True)
class SFTTrainConfig(OptimConfig):
    """Supervised training: larger steps than reinforcement learning takes."""

    steps: int = 1000
    learning_rate: float = 1e-5
    warmup_steps: int = 20
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    micro_batch: int = 8


@dataclass(frozen=True)
class SFTConfig:
    """A supervised warm start on both roles: `envace sft`."""

    output_dir: str
    model: str | None = None  # HF directory to start from; null: random weights of `architecture`
    seed: int = 0
    tokenizer: str | None = None  # HF directory of the tokenizer; null: the model's, or one trained for data.kind=mini
    architecture: dict[str, Any] | None = None  # fields of Hugging Face's config.json, for random weights
    local_heads: tuple[int, ...] | None = None  # random weights: how far back each head of the first layer looks
    role_weights: tuple[float, float] = (1.0, 1.0)  # act, rehearse
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        _require_directory(self.output_dir)
        _require(
            (self.model is None) != (self.architecture is None),
            "set either model (a directory with weights) or architecture (random weights), not both and not neither",
        )
        _require(
            self.architecture is None or self.tokenizer is not None or self.data.kind == "mini",
            "tokenizer must be set when the model starts from architecture and data.kind is not mini",
        )
