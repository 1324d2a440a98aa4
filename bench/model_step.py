"""One policy-gradient step on a small random Qwen3 against what the machine's matrix products would allow.

    python bench/model_step.py                             8 rows of 128 prompt + 128 completion tokens
    python bench/model_step.py --peers DIR --python hf=HF_VENV/bin/python --python tunix=TUNIX_VENV/bin/python

A step is forward and backward of the clipped surrogate over the completions, gradient clipping, and AdamW, in float32
on a CPU; elementwise results are computed again (`train.remat=dots`), and compilation is left out. Each run times three
steps of ours, the rate of a matrix product of the step's own size, and, with `--peers`, the scripts `peer_hf_train.py`
and `peer_tunix_train.py` of that folder, each with its own Python. Medians over the runs are compared. The peers'
environments are made by

    python -m venv tunix && tunix/bin/pip install google-tunix
    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers

One JSON line: tokens a second of each, ours over each peer's (`ratio`), the rate of matrix products, the tokens a
second at which the products that the step needs, with the head for completions alone, would take all of the time
(`bound_tokens_per_s`), and ours as a share of that. The aim is 1.4 times tunix or 80 % of the bound, whichever is
lower; status 1 where tunix was measured and it is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sampling import CONFIG, run_peer  # noqa: E402
from envace_jax import huge_pages  # noqa: E402
from envace_jax.config import TrainConfig  # noqa: E402
from envace_jax.grpo import GRPOConfig, TokenBatch  # noqa: E402
from envace_jax.train.optim import make_optimizer  # noqa: E402
from envace_jax.train.state import create_state, make_update, place_batch  # noqa: E402
from models.qwen3 import Qwen3  # noqa: E402

PEERS = {"hf": "peer_hf_train.py", "tunix": "peer_tunix_train.py"}
STEPS = 3  # of a run, as in the peers' scripts
AIM_OVER_TUNIX, AIM_OF_BOUND = 1.4, 0.8


class Ours:
    """The training step on one shape, compiled once and timed many times."""

    def __init__(self, rows: int, prompt: int, new: int):
        self.tokens = rows * (prompt + new)
        graphdef, params = nnx.split(Qwen3(CONFIG, rngs=nnx.Rngs(0), remat="dots"))
        optimizer = make_optimizer(TrainConfig(learning_rate=1e-6))
        self.state = create_state(params, optimizer)
        self.update = make_update(graphdef, optimizer, GRPOConfig(), entropy=False)
        self.batch = place_batch(make_batch(rows, prompt, new), rows)
        self()

    def __call__(self) -> float:
        """Tokens a second: of the median step."""
        seconds = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            self.state, metrics = self.update(self.state, *self.batch)
            jax.block_until_ready((self.state, metrics))
            seconds.append(time.perf_counter() - begin)
        return self.tokens / statistics.median(seconds)


def make_batch(rows: int, prompt: int, new: int) -> TokenBatch:
    """One row an episode: a prompt and one generation of the acting role."""
    rng = np.random.default_rng(0)
    shape = (rows, prompt + new)
    sampled = np.broadcast_to(np.arange(prompt + new) >= prompt, shape).astype(np.int32)
    return TokenBatch(
        tokens=rng.integers(5, 8000, shape).astype(np.int32),
        positions=np.broadcast_to(np.arange(prompt + new, dtype=np.int32), shape),
        segments=np.ones(shape, np.int32),
        roles=sampled,
        advantages=(rng.normal(size=(rows, 1)) * sampled).astype(np.float32),
        generations=sampled,
    )


def product_flops(rows: int, prompt: int, new: int) -> float:
    """Operations of a step's products with parameters: two a weight and token, forward, and twice that backward; the
    head for the completions alone."""
    heads = (2 * CONFIG.num_attention_heads + 2 * CONFIG.num_key_value_heads) * CONFIG.head_dim
    layer = CONFIG.hidden_size * (heads + 3 * CONFIG.intermediate_size)
    head = CONFIG.vocab_size * CONFIG.hidden_size
    return 3 * 2.0 * rows * (CONFIG.num_hidden_layers * layer * (prompt + new) + head * new)


class Products:
    """The product that most of a step consists of: all tokens times a matrix of the MLP, as the model stores it."""

    def __init__(self, tokens: int):
        self.x = jnp.ones((tokens, CONFIG.hidden_size), jnp.float32)
        self.w = jnp.ones((CONFIG.intermediate_size, CONFIG.hidden_size), jnp.float32)
        self.product = jax.jit(lambda x, w: x @ w.T)
        self.flops = 2.0 * self.x.size * len(self.w)
        self(1)

    def __call__(self, times: int = 20) -> float:
        """Operations a second: of the median product."""
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            self.product(self.x, self.w).block_until_ready()
            seconds.append(time.perf_counter() - begin)
        return self.flops / statistics.median(seconds)


def compare(speeds: dict[str, float], rate: float, shape: tuple[int, int, int]) -> dict[str, float | bool | dict]:
    """What the medians come to: `speeds` in tokens a second by name, ours as `envace_jax`; `rate` in operations."""
    ours = speeds["envace_jax"]
    bound = rate / product_flops(*shape) * shape[0] * (shape[1] + shape[2])
    found = {
        "ratio": {name: round(ours / speed, 3) for name, speed in speeds.items() if name != "envace_jax"},
        "matmul_gflops": round(rate / 1e9, 1),
        "bound_tokens_per_s": round(bound, 1),
        "of_bound": round(ours / bound, 3),
    }
    if "tunix" in speeds:
        found["aim_tokens_per_s"] = round(min(AIM_OVER_TUNIX * speeds["tunix"], AIM_OF_BOUND * bound), 1)
        found["met"] = ours >= found["aim_tokens_per_s"]
    return found


def main() -> int:
    huge_pages.use()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8,128,128", help="ROWS,PROMPT,NEW")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each, alternating")
    parser.add_argument("--peers", type=Path, help="folder with the peers' scripts")
    parser.add_argument("--python", action="append", default=[], help="hf=PATH or tunix=PATH: a peer's Python")
    args = parser.parse_args()
    pythons = dict(item.split("=", 1) for item in args.python)
    if unknown := set(pythons) - set(PEERS):
        parser.error(f"--python knows {', '.join(PEERS)}, found {', '.join(sorted(unknown))}")
    if bool(pythons) != bool(args.peers):
        parser.error("--peers DIR and --python NAME=PATH go together")
    shape = tuple(int(n) for n in args.shape.split(","))

    ours, products = Ours(*shape), Products(shape[0] * (shape[1] + shape[2]))
    speeds: dict[str, list[float]] = {name: [] for name in ("envace_jax", *pythons)}
    rates = []
    for _ in range(args.runs):
        rates.append(products())
        speeds["envace_jax"].append(ours())
        for name, python in pythons.items():
            speeds[name].append(run_peer(python, args.peers / PEERS[name], *shape)["tok_s"])
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    result = {
        "bench": "model_step",
        "device": jax.devices()[0].device_kind,
        "rows": shape[0],
        "prompt": shape[1],
        "new": shape[2],
        "runs": args.runs,
        "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "spread": {name: [round(min(values), 1), round(max(values), 1)] for name, values in speeds.items()},
        **compare(medians, statistics.median(rates), shape),
    }
    print(json.dumps(result))
    return int(result.get("met") is False)


if __name__ == "__main__":
    sys.exit(main())
