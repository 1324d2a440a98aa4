"""Continuous batching against waiting for the longest, on requests of lognormal lengths.

    python bench/batch_mix.py                       64 requests of 64 prompt tokens in 16 slots, 64 new ones in the mean
    python bench/batch_mix.py 16 64 64 --requests 128
    python bench/batch_mix.py --peers               transformers' `generate` beside ours, a batch of 16 after the other

The lengths have a fixed seed, the longest about four times the mean, and are the requests' budgets. Ours begins with
the largest budgets and refills a slot when its request has ended; `waiting` is the same engine, given 16 requests at a
time. Both sample the same tokens. transformers, which cannot refill either, runs each batch to its longest; only
what was asked for is counted. One JSON line: `ratio` is their time over ours, `bound_tok_s` what products alone would
allow (see `sampling`). The aim is 1.8 times `waiting`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sampling import CONFIG, Products, bound_seconds, peer_arguments, peer_pythons, run_peer, summary  # noqa: E402
from envace_jax import huge_pages  # noqa: E402
from envace_jax.sampling import Completion, Engine, SamplingParams, sequence_keys  # noqa: E402
from models.qwen3 import Qwen3  # noqa: E402

LONGEST = 4  # times the mean
PEER = Path(__file__).resolve().parent / "peer_turns.py"


def make_lengths(requests: int, mean: int, seed: int = 0) -> list[int]:
    """Lognormal lengths whose mean is about `mean` and whose longest is `LONGEST` times that."""
    z = np.random.default_rng(seed).normal(size=requests)

    def drawn(sigma: float) -> np.ndarray:
        x = np.exp(sigma * z)
        return x / x.mean()

    low, high = 0.0, 4.0
    for _ in range(60):  # the longest grows with sigma
        sigma = (low + high) / 2
        low, high = (sigma, high) if drawn(sigma).max() < LONGEST else (low, sigma)
    return np.maximum(1, np.round(mean * drawn(low))).astype(int).tolist()


class Ours:
    """Two engines, one that refills slots and one that is given a batch at a time."""

    def __init__(self, slots: int, prompt: int, lengths: list[int]):
        self.slots, self.lengths = slots, lengths
        self.model = Qwen3(CONFIG, rngs=nnx.Rngs(0))
        size = prompt + max(lengths)
        self.refilling = Engine(CONFIG, slots=slots, max_length=size)
        self.fixed = Engine(CONFIG, slots=slots, max_length=size, compact=False)
        rng = np.random.default_rng(1)
        self.prompts = [rng.integers(5, 8000, prompt).astype(np.int32) for _ in lengths]

    def continuous(self, seed: int) -> list[Completion]:
        """All requests, slots refilled as they end."""
        params, keys = self._requests(seed)
        return self.refilling.generate(self.model, self.prompts, params, keys=keys)

    def waiting(self, seed: int) -> list[Completion]:
        """A batch after the other, each until its longest has ended."""
        params, keys = self._requests(seed)
        out: list[Completion] = []
        for at in range(0, len(self.prompts), self.slots):
            batch = slice(at, at + self.slots)
            out += self.fixed.generate(self.model, self.prompts[batch], params[batch], keys=keys[batch])
        return out

    def _requests(self, seed: int) -> tuple[list[SamplingParams], np.ndarray]:
        params = [SamplingParams(max_new_tokens=length) for length in self.lengths]
        return params, sequence_keys(seed, 0, range(len(params)))


def main() -> None:
    huge_pages.use()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="*", type=int, help="B P G: slots, prompt tokens, new tokens in the mean")
    parser.add_argument("--requests", type=int, help="how many; by default four times B")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each")
    peer_arguments(parser, ("hf",), scripts=False)
    args = parser.parse_args()
    if len(args.shape) not in (0, 3):
        parser.error("the shape is three numbers: B P G")
    slots, prompt, mean = args.shape or (16, 64, 64)
    pythons = peer_pythons(parser, args, ("hf",))
    lengths = make_lengths(args.requests or 4 * slots, mean)
    ours = Ours(slots, prompt, lengths)
    ways = {"envace_jax": ours.continuous, "waiting": ours.waiting}
    sampled = {name: run(0) for name, run in ways.items()}  # compiled here
    for a, b in zip(*sampled.values(), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist(), "the two ways sample the same tokens"
    prefill, decode = Products(slots * prompt), Products(slots)
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, *pythons)}
    rates = []
    batches = [[[prompt] * len(part), part] for part in (lengths[i : i + slots] for i in range(0, len(lengths), slots))]
    for run in range(args.runs):
        rates.append((prefill(5), decode()))
        for name, way in ways.items():
            begin = time.perf_counter()
            way(run + 1)
            seconds[name].append(time.perf_counter() - begin)
        for name, python in pythons.items():
            seconds[name].append(run_peer(python, PEER, json.dumps(batches))["s"])
    rate = tuple(float(np.median(column)) for column in zip(*rates, strict=True))
    bound = bound_seconds(prompt * len(lengths), sum(lengths), rate)
    more = {"B": slots, "P": prompt, "G": mean, "requests": len(lengths), "longest": max(lengths), "runs": args.runs}
    found = summary("batch_mix", sum(lengths), seconds, bound, **more)
    print(json.dumps(found | {"met": found["ratio"]["waiting"] >= 1.8}))


if __name__ == "__main__":
    main()
