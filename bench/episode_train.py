"""What training on whole episodes saves: one segment per episode against one row per generation with its whole prefix.

    python bench/episode_train.py [--episodes 32] [--calls 6] [--model small|mini|qwen3-0.6b]

The same episodes, advantages and loss, twice: packed as trajectories, each token forwarded once; and with every
generation as a sequence of its own behind a copy of all that came before it, which is what the release trains on. The
second is packed too, so it pays for its tokens and not for padding. One JSON line: `tokens_ratio`, `wall_ratio` and
`cpu_ratio` (second over first; the last is that of processor time, which others on the machine do not change much), and
by how much the losses and gradients differ. Status 1 where losses differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import statistics
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

COMMON = dict(vocab_size=768, head_dim=32, tie_word_embeddings=True)
SHAPES = {
    "small": dict(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    ),
    "mini": dict(
        hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
    ),
}
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


class Way:
    """One way to lay the same episodes out: its batch, and what updates on it cost."""

    def __init__(self, update, state, trajectories: Sequence[Trajectory], advantages, row: int, micro_batch: int):
        self._update = update
        batch = pack(trajectories, advantages, row)
        self._batch, self._used = place_batch(batch, micro_batch)
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.figures = {
            "sequences": len(trajectories),
            "tokens": sum(map(len, trajectories)),
            "rows": int(batch.tokens.shape[0]),
            "pad_fraction": round(pad_fraction(batch), 4),
        }
        began = time.perf_counter()
        self._state, metrics = update(state, self._batch, 1)  # one micro-batch is enough to compile
        jax.block_until_ready(metrics)
        self.figures["compile_s"] = round(time.perf_counter() - began, 3)

    def run(self) -> None:
        """One update over all episodes."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._state, metrics = self._update(self._state, self._batch, self._used)
        self.loss, self.norm = float(metrics["loss/total"]), float(metrics["grad/norm"])
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def report(self) -> dict[str, float]:
        times = {"update_s": statistics.median(self.wall), "update_cpu_s": statistics.median(self.cpu)}
        return self.figures | {name: round(value, 4) for name, value in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--scale", type=int, default=1, help="lengths of the embedded world's episodes, times this")
    parser.add_argument("--row", type=int, default=None, help="row width; default: holds the longest episode")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="updates each way, in turn; medians are reported")
    parser.add_argument("--model", default="small", help="small, mini (the shipped policy's shape) or a preset's name")
    args = parser.parse_args()

    shape = SHAPES.get(args.model)
    config = Qwen3Config.preset(args.model) if shape is None else Qwen3Config(**COMMON, **shape)
    episodes = make_episodes(args.episodes, args.calls, config.vocab_size, args.scale)
    rng = np.random.default_rng(1)
    advantages = [{g: float(rng.normal()) for g in t.generation_roles()} for t in episodes]
    rows = [row for t in episodes for row in one_row_each(t)]
    row_advantages = [{g: a} for own in advantages for g, a in own.items()]
    width = args.row or -(-max(map(len, episodes)) // 128) * 128

    model = Qwen3(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    optimizer = optax.sgd(0.0)  # so that both learn from the same parameters
    update = make_update(graphdef, optimizer, GRPOConfig(), old_logps="sampler", entropy=False)

    def way(trajectories: Sequence[Trajectory], advantages) -> Way:
        state = create_state(jax.tree.map(jnp.copy, params), optimizer)
        return Way(update, state, trajectories, advantages, width, args.micro_batch)

    whole, each = way(episodes, advantages), way(rows, row_advantages)
    for _ in range(args.repeats):  # in turn, so that a busy machine slows both
        whole.run()
        each.run()
    one, other = whole.report(), each.report()
    result = {
        "bench": "episode_train",
        "device": jax.devices()[0].device_kind,
        "model": args.model,
        "episodes": args.episodes,
        "calls": args.calls,
        "row": width,
        "loss": whole.loss,
        "loss_difference": abs(whole.loss - each.loss),
        "gradient_norm_difference": abs(whole.norm - each.norm) / whole.norm,
        "tokens_ratio": round(other["tokens"] / one["tokens"], 3),
        "wall_ratio": round(other["update_s"] / one["update_s"], 3),
        "cpu_ratio": round(other["update_cpu_s"] / one["update_cpu_s"], 3),
        "segment_per_episode": one,
        "row_per_generation": other,
    }
    print(json.dumps(result))
    return int(result["loss_difference"] > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
