"""What the sampling benches share: the model of the peers' scripts, the bound by matrix products, and how peers run.

The bound is the time that the products with parameters alone would take, at the rate this machine multiplies matrices
of the same sizes in the same run: all tokens of a prompt at once through the layers, new ones a row at a time, and the
head for each token that is sampled. Attention, norms and the drawing of tokens are free in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from envace_jax import huge_pages
from envace_jax.sampling.pieces import weights_per_token
from models.qwen3 import Qwen3Config

CONFIG = Qwen3Config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)


def bound_seconds(read: int, sampled: int, rates: tuple[float, float], config: Qwen3Config = CONFIG) -> float:
    """The least time for `read` tokens of prompts and `sampled` new ones; rates: operations a second for either."""
    layers, head = weights_per_token(config), config.vocab_size * config.hidden_size
    return 2.0 * layers * read / rates[0] + 2.0 * (layers + head) * sampled / rates[1]


class Products:
    """The product that most of a forward pass of `rows` tokens consists of, in whichever form is faster here."""

    def __init__(self, rows: int, config: Qwen3Config = CONFIG):
        x = jnp.ones((rows, config.hidden_size), jnp.float32)
        w = jnp.ones((config.intermediate_size, config.hidden_size), jnp.float32)
        self.flops = 2.0 * x.size * len(w)
        self._forms = [(jax.jit(lambda x, w: x @ w.T), x, w), (jax.jit(lambda w, x: w @ x.T), w, x)]
        self(1)

    def __call__(self, times: int = 20) -> float:
        """Operations a second: of the median product."""
        medians = []
        for product, *operands in self._forms:
            seconds = []
            for _ in range(times):
                begin = time.perf_counter()
                product(*operands).block_until_ready()
                seconds.append(time.perf_counter() - begin)
            medians.append(statistics.median(seconds))
        return self.flops / min(medians)


def peer_arguments(parser: argparse.ArgumentParser, names: tuple[str, ...], scripts: bool) -> None:
    """`--peers` and `--python`; with `scripts`, `--peers` names the folder that has the peers' scripts."""
    if scripts:
        parser.add_argument(
            "--peers", type=Path, metavar="DIR", help="run the peers' scripts of this folder beside ours"
        )
    else:
        parser.add_argument("--peers", action="store_true", help="run the peers beside ours")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"a peer's Python ({', '.join(names)}); by default this one, for hf alone",
    )


def peer_pythons(parser: argparse.ArgumentParser, args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, str]:
    """The Python of each peer that is to run."""
    pythons = dict(item.split("=", 1) for item in args.python)
    if unknown := set(pythons) - set(names):
        parser.error(f"--python knows {', '.join(names)}, found {', '.join(sorted(unknown))}")
    if not args.peers:
        if pythons:
            parser.error("--python is for --peers")
        return {}
    return {"hf": sys.executable} | pythons


def run_peer(python: str, script: Path, *arguments: object) -> dict[str, float]:
    """The JSON object that a peer's script prints in its last line."""
    command = [python, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=huge_pages.environment_without())
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def summary(name: str, tokens: int, seconds: dict[str, list[float]], bound: float, **more: object) -> dict[str, object]:
    """One line of a bench: medians by name, ours first, for `tokens` sampled tokens; `bound` in seconds."""
    medians = {who: statistics.median(values) for who, values in seconds.items()}
    ours = medians.pop("envace_jax")
    return {
        "bench": name,
        "device": jax.devices()[0].device_kind,
        **more,
        "tokens": tokens,
        "s": round(ours, 4),
        "tok_s": round(tokens / ours, 1),
        "bound_tok_s": round(tokens / bound, 1),
        "of_bound": round(bound / ours, 3),
        "others_tok_s": {who: round(tokens / value, 1) for who, value in medians.items()},
        "ratio": {who: round(value / ours, 3) for who, value in medians.items()},
        "spread_s": {who: [round(min(values), 4), round(max(values), 4)] for who, values in seconds.items()},
    }
