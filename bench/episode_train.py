"""What training on whole episodes saves: one segment per episode against one row per generation with its whole prefix.

    python bench/episode_train.py [--episodes 32] [--calls 6] [--preset qwen3-0.6b]

The same episodes, advantages and loss, twice: packed as trajectories, each token forwarded once; and with every
generation as a sequence of its own behind a copy of all that came before it, which is what the release trains on. The
second is packed too, so it pays for its tokens and not for padding. One JSON line: `tokens_ratio` and `wall_ratio`
(second over first), and by how much the losses and gradients differ. Status 1 where losses differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from envace_jax.grpo import GRPOConfig  # noqa: E402
from envace_jax.rollout.trajectory import ACT, REHEARSE, TokenStream, Trajectory  # noqa: E402
from envace_jax.train.packing import pack, pad_fraction  # noqa: E402
from envace_jax.train.state import create_state, make_update, place_batch  # noqa: E402
from models.qwen3 import Qwen3, Qwen3Config  # noqa: E402

MINI = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
TOLERANCE = 1e-5


def make_episodes(count: int, calls: int, vocab_size: int, scale: int, seed: int = 0) -> list[Trajectory]:
    """Episodes of random tokens: a prompt, `calls` calls with a rehearsed response each, and a reply.

    Lengths are those of the embedded world's episodes, times `scale`.
    """
    rng = np.random.default_rng(seed)
    level = -np.log(vocab_size)

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, vocab_size, rng.integers(low, high) * scale).astype(np.int32)

    episodes = []
    for number in range(count):
        stream = TokenStream()
        stream.context(tokens(180, 220))
        for role in [ACT, REHEARSE] * calls + [ACT]:
            sampled = tokens(15, 35)
            stream.generation(role, sampled, level + rng.normal(0, 0.15, len(sampled)))
            stream.context(tokens(4, 8))
        episodes.append(stream.finish(trajectory=number, task_id=f"bench-{number}"))
    return episodes


def one_row_each(episode: Trajectory) -> list[Trajectory]:
    """Every generation as a sequence of its own, behind all that came before it as context."""
    rows = []
    for generation in episode.generation_roles():
        own = episode.generations == generation
        end = int(np.flatnonzero(own)[-1]) + 1
        rows.append(
            Trajectory(
                tokens=episode.tokens[:end],
                roles=np.where(own, episode.roles, 0)[:end],
                generations=np.where(own, generation, 0)[:end],
                behavior_logps=np.where(own, episode.behavior_logps, 0)[:end],
                trajectory=episode.trajectory,
            )
        )
    return rows


def measure(update, state, trajectories: Sequence[Trajectory], advantages, row: int, micro_batch: int, repeats: int):
    """Loss and gradient norm of one update over `trajectories`, the fastest of `repeats`, and what was forwarded."""
    batch = pack(trajectories, advantages, row)
    placed, used = place_batch(batch, micro_batch)
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        state, metrics = update(state, placed, used)
        loss, norm = float(metrics["loss/total"]), float(metrics["grad/norm"])
        seconds.append(time.perf_counter() - began)
    figures = {
        "sequences": len(trajectories),
        "tokens": sum(map(len, trajectories)),
        "rows": int(batch.tokens.shape[0]),
        "pad_fraction": round(pad_fraction(batch), 4),
        "compile_s": round(seconds[0] - min(seconds[1:]), 3),
        "update_s": round(min(seconds[1:]), 4),
    }
    return state, loss, norm, figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--scale", type=int, default=1, help="lengths of the embedded world's episodes, times this")
    parser.add_argument("--row", type=int, default=None, help="row width; default: holds the longest episode")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--preset", default=None, help="a preset with random weights; default: the mini policy")
    args = parser.parse_args()

    if args.preset:
        config = Qwen3Config.preset(args.preset)
    else:
        config = Qwen3Config(vocab_size=768, head_dim=32, tie_word_embeddings=True, **MINI)
    episodes = make_episodes(args.episodes, args.calls, config.vocab_size, args.scale)
    rng = np.random.default_rng(1)
    advantages = [{g: float(rng.normal()) for g in t.generation_roles()} for t in episodes]
    rows = [row for t in episodes for row in one_row_each(t)]
    row_advantages = [{g: a} for own in advantages for g, a in own.items()]
    width = args.row or -(-max(map(len, episodes)) // 128) * 128

    model = Qwen3(config, rngs=nnx.Rngs(0), dtype=jnp.float32 if jax.default_backend() == "cpu" else None)
    graphdef, params = nnx.split(model)
    optimizer = optax.sgd(0.0)  # the same parameters for both
    state = create_state(params, optimizer)
    update = make_update(graphdef, optimizer, GRPOConfig(), old_logps="sampler", entropy=False)
    state, loss, norm, whole = measure(update, state, episodes, advantages, width, args.micro_batch, args.repeats)
    _, row_loss, row_norm, each = measure(update, state, rows, row_advantages, width, args.micro_batch, args.repeats)
    result = {
        "bench": "episode_train",
        "device": jax.devices()[0].device_kind,
        "model": args.preset or "mini",
        "episodes": args.episodes,
        "calls": args.calls,
        "loss": loss,
        "loss_difference": abs(loss - row_loss),
        "gradient_norm_difference": abs(norm - row_norm) / norm,
        "tokens_ratio": round(each["tokens"] / whole["tokens"], 3),
        "wall_ratio": round(each["update_s"] / whole["update_s"], 3),
        "segment_per_episode": whole,
        "row_per_generation": each,
    }
    print(json.dumps(result))
    return int(result["loss_difference"] > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
