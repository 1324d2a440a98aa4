"""Whole episodes of a policy that rehearses: the fused loop against the hosted path and a sampler without a memory.

    python bench/rollout.py                         64 episodes of 4 rehearsed calls; 128 prompt tokens, 24 a generation
    python bench/rollout.py 64 128 24 --runs 5
    python bench/rollout.py --peers                 transformers' `generate` beside ours (`pip install -e '.[parity]'`)

A small random Qwen3 (the peers' shape, head untied) whose weights are arranged so that it speaks: in dimensions of its
own the residual stream carries the last token, and the head knows what may follow. Each generation has a random length
and ends in a call or a response that can be read; an episode is four of each and comes to its end by `max_turns`.
Groups of four share a prompt. Fused and hosted must sample the same tokens.

The peer is called once a turn, with the whole prefix of every episode, for as many tokens as our episodes have there:
a rollout without a prefix cache, whose turns wait for their longest row. One JSON line: `ratio` is their time over
that of the fused loop, `dispatches` the calls of compiled programs per episode, `bound_tok_s` what products alone would
allow (see `sampling`). The aim is 4 times the peer, and no less than hosted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sampling import CONFIG, Products, bound_seconds, peer_arguments, peer_pythons, run_peer, summary  # noqa: E402
from envace_jax import huge_pages  # noqa: E402
from envace_jax.chat import ChatTokenizer  # noqa: E402
from envace_jax.chat.build import train_tokenizer  # noqa: E402
from envace_jax.config import RolloutConfig  # noqa: E402
from envace_jax.rollout import Trajectory, run_episodes  # noqa: E402
from envace_jax.sampling import Engine  # noqa: E402
from envace_jax.tasks import Task, parse_task  # noqa: E402
from models.qwen3 import Qwen3, Qwen3Config  # noqa: E402

PEER = Path(__file__).resolve().parent / "peer_turns.py"
CALLS = 4
GROUP = 4
CODES = 128  # dimensions of the residual stream that carry the last token
ENDING = 5  # tokens of a generation beside those that are counted down
CALL = '{"name": "get_order", "arguments": {"order": 111}}'
RESPONSE = '{"item": "lamp"}'


class Script:
    """A tokenizer to which each line is one token, and what may follow each of them.

    The actor says one of `words` and counts down to the first, then calls; so does the rehearser in its thoughts.
    """

    def __init__(self, words: int, directory: Path):
        acting, rehearsing = ([f"{letter}{i:02d}" for i in range(words)] for letter in "ar")
        lines = [CALL, RESPONSE, *acting, *rehearsing, "\n\n"]
        train_tokenizer(lines * 50, 1000, directory, pattern=r"[^\n]+|\n+")
        self.chat = ChatTokenizer.from_pretrained(directory)
        control = self.chat.control
        acts, thoughts = [self._id(w) for w in acting], [self._id(w) for w in rehearsing]
        self.follows: dict[int, list[int]] = {
            self._id("\n\n"): acts,  # where an acting generation begins
            acts[0]: [control.call_open],
            control.call_open: [self._id(CALL)],
            self._id(CALL): [control.call_close],
            control.call_close: [control.im_end],
            self._id("\n"): [control.think_open],  # where a response begins
            control.think_open: thoughts,
            thoughts[0]: [control.think_close],
            control.think_close: [self._id(RESPONSE)],
            self._id(RESPONSE): [control.response_close],
        }
        for chain in (acts, thoughts):
            self.follows |= {word: [before] for before, word in zip(chain, chain[1:], strict=False)}
        self._words = acting

    def task(self, number: int, tokens: int) -> Task:
        """A task whose user speaks for about `tokens` tokens."""
        rng = np.random.default_rng([number, tokens])
        said = "\n".join(rng.choice(self._words, max(1, tokens // 2 + int(rng.integers(-8, 8)))))
        items = [{"id": "i", "question": "?", "focus_on": "assistant.content", "pass_condition": "p", "weight": 1.0}]
        items[0]["rule"] = {"kind": "reply_states", "statements": ["done"]}
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "done"}]
        return parse_task(
            {"uuid": f"t{number}", "messages": messages, "tools": [], "checklists": [[items]], "meta": {}}
        )

    def _id(self, text: str) -> int:
        (token,) = self.chat.encode_text(text)
        return int(token)


def make_policy(config: Qwen3Config, follows: dict[int, list[int]]) -> Qwen3:
    """A random Qwen3 that draws each token uniformly from what follows the last one."""
    if len(follows) > CODES:
        raise ValueError(f"{len(follows)} tokens of the script do not fit {CODES} codes: make the generations shorter")
    model = Qwen3(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    codes = np.linalg.qr(rng.normal(size=(CODES, CODES)))[0] * np.sqrt(CODES)
    embed = rng.normal(0, 0.3, (config.vocab_size, config.hidden_size)).astype(np.float32)
    head = rng.normal(0, 0.005, (config.vocab_size, config.hidden_size)).astype(np.float32)
    embed[:, :CODES] = 0
    head[:, :CODES] = 0
    for code, (token, nexts) in zip(codes, follows.items(), strict=False):
        embed[token, :CODES] = code
        head[nexts, :CODES] += code
    model.embed_tokens[...], model.lm_head[...] = jnp.asarray(embed), jnp.asarray(head)
    # No layer writes to the dimensions of the codes.
    for matrix in (model.layers.o_proj, model.layers.down_proj):
        matrix[...] = matrix[...].at[:, :CODES].set(0)
    return model


class CountingEngine(Engine):
    """An engine that counts the calls of its compiled programs."""

    calls = 0

    def jit(self, body: Callable, static: Sequence[str] = (), donate: Sequence[str] = ()) -> Callable:
        program = super().jit(body, static, donate)

        def counted(**arguments):
            self.calls += 1
            return program(**arguments)

        return counted


class Ours:
    """Both paths on the same episodes."""

    def __init__(self, script: Script, config: Qwen3Config, episodes: int, prompt: int, words: int):
        self.script, self.model = script, make_policy(config, script.follows)
        self.tasks = [script.task(i, prompt) for i in range(-(-episodes // GROUP))]
        longest = max(len(script.chat.render(task.prompt, task.tools, True, False)) for task in self.tasks)
        self.settings = RolloutConfig(
            group_size=GROUP,
            thinking=False,
            max_turns=CALLS,
            turn_tokens=words + ENDING,
            response_tokens=words + ENDING,
            # With room for what is forced around calls and responses.
            max_length=longest + CALLS * (2 * (words + ENDING) + 24),
        )
        slots = GROUP * len(self.tasks)
        size = self.settings.max_length
        self.engine = CountingEngine(config, slots=slots, max_length=size, vocab_size=script.chat.vocab_size)

    def __call__(self, path: str, seed: int) -> tuple[list[Trajectory], float, int]:
        """Episodes, seconds, and calls of compiled programs."""
        settings = dataclasses.replace(self.settings, engine=path)
        before, begin = self.engine.calls, time.perf_counter()
        out = run_episodes(self.engine, self.model, self.script.chat, self.tasks, settings=settings, seed=seed)
        return out, time.perf_counter() - begin, self.engine.calls - before


def turns(episodes: list[Trajectory]) -> list[list[list[int]]]:
    """For each generation of the episodes: how many tokens come before it, and how many it has."""
    out = []
    for number in range(1, 2 * CALLS + 1):
        where = [np.flatnonzero(episode.generations == number) for episode in episodes]
        out.append([[int(at[0]) for at in where], [len(at) for at in where]])
    return out


def main() -> None:
    huge_pages.use()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="*", type=int, help="B P G: episodes, prompt tokens, tokens of a generation")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each")
    peer_arguments(parser, ("hf",), scripts=False)
    args = parser.parse_args()
    if len(args.shape) not in (0, 3):
        parser.error("the shape is three numbers: B P G")
    episodes, prompt, mean = args.shape or (64, 128, 24)
    pythons = peer_pythons(parser, args, ("hf",))
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    words = 2 * (mean - ENDING) + 1
    with tempfile.TemporaryDirectory() as directory:
        script = Script(words, Path(directory))
    ours = Ours(script, config, episodes, prompt, words)
    paths = ("fused", "hosted")
    seconds: dict[str, list[float]] = {name: [] for name in ("envace_jax", "hosted", *pythons)}
    dispatches: dict[str, float] = {}
    rates = []
    prefill, decode = Products(len(ours.tasks) * prompt), Products(ours.engine.slots)
    for run in range(args.runs):
        found = {}
        for path in paths:
            if run == 0:
                ours(path, run)  # compiled here
            found[path], spent, calls = ours(path, run)
            seconds["envace_jax" if path == "fused" else path].append(spent)
            dispatches[path] = round(calls / len(found[path]), 2)
        for a, b in zip(found["fused"], found["hosted"], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist(), "the two paths sample the same episodes"
            assert a.finish == "turns" and len(a.generation_roles()) == 2 * CALLS
        rates.append((prefill(5), decode()))
        for name, python in pythons.items():
            seconds[name].append(run_peer(python, PEER, json.dumps(turns(found["fused"])))["s"])
    sampled = sum(int((t.roles > 0).sum()) for t in found["fused"])
    # A group's prompt is read once; what is forced is read as it is sampled, a row at a time, without the head.
    prompts = [int((t.roles > 0).argmax()) for t in found["fused"]]
    forced = sum(len(t.tokens) for t in found["fused"]) - sum(prompts) - sampled
    rate = tuple(float(np.median(column)) for column in zip(*rates, strict=True))
    bound = bound_seconds(sum(prompts[::GROUP]) + forced, sampled, rate, config)
    more = {"B": len(prompts), "P": prompt, "G": mean, "calls": CALLS, "runs": args.runs, "dispatches": dispatches}
    line = summary("rollout", sampled, seconds, bound, **more)
    if "hf" in line["ratio"]:
        line["met"] = line["ratio"]["hf"] >= 4 and line["ratio"]["hosted"] >= 1
    print(json.dumps(line))


if __name__ == "__main__":
    main()
