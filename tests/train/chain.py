"""A policy that a test can foretell: a Qwen3 whose next token depends on the last one, and a little on all others.

Each line of a script is one token, and the script says with which probability a line follows another. Attention adds
small noise, so that log-probabilities betray a token that was scored in another context than it was sampled in.

`SCRIPTS` make calls, rehearse responses and end episodes in every way, on the tasks of `write_tasks` and on those in
the public format, `VERL`, whose items only a judge can answer; `make_run` is a run of them through the real engine.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from envace_jax.chat import ChatTokenizer, ToolCall
from envace_jax.chat.build import train_tokenizer
from envace_jax.config import Config
from envace_jax.rollout import Simulator
from envace_jax.tasks import read_tasks
from models.qwen3 import Qwen3, Qwen3Config, save_hf
from tests.rewards.endpoint import verdict
from tests.rollout.conftest import make_task
from tests.train.runs import make_config

VERL = Path(__file__).resolve().parents[1] / "fixtures" / "tasks" / "verl.parquet"

NEVER = -20.0  # log-probability of what the script does not name
NOISE = 1e-3  # of the attention's output, against states of length 1

CALL = '{"name": "get_order", "arguments": {"order": 111}}'
DREAMT, REJECTED = '{"dreamt": 1}', '{"error_tool_call": {}}'
TAGGED = f"<execution_result>{DREAMT}</execution_result>"
REPLY, THOUGHT = "Done 0.", "Let me see."
ACTS = {
    "call_open": {CALL: 1.0},
    CALL: {"call_close": 1.0},
    "call_close": {"im_end": 0.8, "call_open": 0.2},
    "think_open": {THOUGHT: 1.0},
    THOUGHT: {"think_close": 1.0},
    "think_close": {REPLY: 0.6, "call_open": 0.4},
    REPLY: {"im_end": 0.9, "endoftext": 0.1},
}
INLINE = ACTS | {
    "\n\n": {"call_open": 0.5, REPLY: 0.3, "think_open": 0.2},  # the actor begins
    "\n": {DREAMT: 0.9, REJECTED: 0.1},  # the rehearser begins
    DREAMT: {"response_close": 1.0},
    REJECTED: {"response_close": 1.0},
}
# Under prompts of their own rehearsals begin as acts do.
PROMPTED = ACTS | {
    "\n\n": {"call_open": 0.4, REPLY: 0.2, TAGGED: 0.4},
    TAGGED: {"im_end": 1.0},
}
SCRIPTS = {"inline": INLINE, "simulator": PROMPTED}  # by `world.form`

# Sections of a run that has every term of the objective.
EVERY_TERM: dict[str, Any] = {
    "rollout": {"max_refills": 1, "max_length": 160},
    "reward": {"overlong": "shape", "overlong_buffer": 160},
    "advantage": {"baseline": "generation", "scale_by_std": True, "leave_one_out": True},
    "grpo": {
        "ratio": "sequence",
        "aggregate": "seq-mean-token-mean",
        "kl": "k3+",
        "kl_coef": 0.1,
        "sampler_correction": "sequence",
        "entropy_coef": 0.01,
        "role_weights": [1.0, 0.5],
    },
    "train": {"old_logps": "recompute", "updates_per_batch": 2},
}


def write_tasks(path: Path, names: Iterable[str] = ("one", "two")) -> Path:
    """Tasks of two user turns, with rules and an executable environment; all alike but for their names."""
    items = [{"id": "a", "question": "?", "focus_on": "assistant.content", "pass_condition": "p", "weight": 1.0}]
    items[0]["rule"] = {"kind": "reply_states", "statements": ["Done 0"]}
    task = make_task(2, [items, items])
    records = [dataclasses.replace(task, id=name).to_json() for name in names]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def save_scripted(directory: Path, form: str, tasks: Path, *, heads: int = 1) -> Path:
    """Writes the policy of `SCRIPTS[form]`, whose tokenizer knows `tasks` and `VERL`; see `save_chain`."""
    known = [task for path in (VERL, tasks) for task in read_tasks(str(path))]
    prompts = [m["content"] for task in known for m in task.messages]
    prompts += [json.dumps(tool) for task in known for tool in task.tools]
    call = ToolCall("get_order", {"order": 111})
    prompts += [m["content"] for m in Simulator().messages(known[-1], [], "", call)]
    return save_chain(directory, SCRIPTS[form], prompts, heads=heads)


def make_run(policy: Path, out: Path, tasks: Path, steps: int = 2, **sections: Any) -> Config:
    """Two groups of four episodes a step; `sections` are merged with these settings."""
    form = sections.get("world", {}).get("form", "inline")
    settings: dict[str, Any] = {
        "tasks": {"kind": "checklist", "path": str(tasks)},
        "rollout": {
            "group_size": 4,
            "tasks_per_step": 2,
            "max_length": {"inline": 256, "simulator": 512}[form],
            "turn_tokens": 12,
            "response_tokens": 8,
            "max_turns": 5,
        },
        "train": {"save_every": 1, "micro_batch": 4, "learning_rate": 1e-3},
        "logging": {"trajectories_every": 1},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return make_config(policy, out, steps, **settings)


def decide(handler: Any) -> None:
    """The script of an `Endpoint` that judges, by what it is shown alone."""
    handler.reply(verdict(zlib.crc32(handler.asked["messages"][1]["content"].encode()) % 3 > 0))


def save_chain(
    directory: Path, follows: Mapping[str, Mapping[str, float]], prompts: Iterable[str], *, heads: int = 1
) -> Path:
    """Writes the policy as a Hugging Face directory and returns it.

    follows: line -> {line: probability}; lines are text without breaks, breaks alone, or names of control ids.
    prompts: texts that prompts are made of, so that they take few tokens.
    heads: of attention, as many as a mesh has to share between.
    """
    lines = {line for before, after in follows.items() for line in (before, *after)}
    train_tokenizer([*lines] * 1000 + [*prompts], 6000, directory / "tokenizer", pattern=r"[^\n]+|\n+")
    chat = ChatTokenizer.from_pretrained(directory / "tokenizer")

    def id_of(line: str) -> int:
        if hasattr(chat.control, line):
            return getattr(chat.control, line)
        (token,) = chat.encode_text(line)
        return int(token)

    states = {id_of(line): number for number, line in enumerate(follows, start=1)}
    size = len(states) + 1  # state 0: any other token
    config = Qwen3Config(
        vocab_size=-(-chat.vocab_size // 8) * 8,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = Qwen3(config, rngs=nnx.Rngs(0))
    embedding = np.zeros((config.vocab_size, size), np.float32)
    embedding[:, 0] = 1.0
    head = np.full((config.vocab_size, size), NEVER, np.float32)
    head[chat.control.im_end, 0] = 0.0
    for line, after in follows.items():
        state = states[id_of(line)]
        embedding[id_of(line)] = np.eye(size, dtype=np.float32)[state]
        for next_line, probability in after.items():
            head[id_of(next_line), state] = np.log(probability)
    model.embed_tokens[...] = embedding
    model.lm_head[...] = head / np.sqrt(size)  # the final norm makes a state sqrt(size) long
    unit = 1 / config.initializer_range
    model.layers.v_proj[...] = model.layers.v_proj[...] * unit
    model.layers.o_proj[...] = model.layers.o_proj[...] * unit * NOISE
    model.layers.down_proj[...] = jnp.zeros_like(model.layers.down_proj[...])
    save_hf(model, directory / "hf", "float32")
    for path in (directory / "tokenizer").iterdir():
        path.rename(directory / "hf" / path.name)
    return directory / "hf"
