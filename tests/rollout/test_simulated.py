"""The simulator form through the real engine: what each cache is spared, and that no record notices."""

import dataclasses
import os

import jax.numpy as jnp
import numpy as np
import pytest

from bench.rollout import make_policy
from envace_jax.chat import ChatTokenizer, ToolCall
from envace_jax.chat.build import train_tokenizer
from envace_jax.grpo import token_logps
from envace_jax.rollout import ACT, REHEARSE, RehearsalWorld, Simulator, run_episodes
from envace_jax.sampling import Engine
from models.qwen3 import Qwen3Config

from .conftest import SETTINGS, make_task

CALL = '{"name": "get_order", "arguments": {"order": 111}}'
ANSWER = '<execution_result>{"found": true}</execution_result>'


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> ChatTokenizer:
    """A tokenizer to which CALL, ANSWER and the lines of the simulator's prompt are few tokens."""
    directory = tmp_path_factory.mktemp("lines")
    (system, user) = Simulator(thinking=False).messages(make_task(), [], "", ToolCall("get_order", {"order": 111}))
    prompt = system["content"].split("\n") + user["content"].split("\n")
    train_tokenizer([CALL, ANSWER, "\n\n", *prompt] * 50, 4000, directory, pattern=r"[^\n]+|\n+")
    return ChatTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def policy(lines):
    """Says CALL or ANSWER, whoever is asked: half of the calls are answered, and half of the turns are replies."""
    config = dataclasses.replace(
        Qwen3Config.preset("qwen3-0.6b"),
        vocab_size=lines.vocab_size,
        hidden_size=160,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    control = lines.control
    begin, call, answer = (int(lines.encode_text(text)[0]) for text in ("\n\n", CALL, ANSWER))
    return make_policy(
        config,
        {
            begin: [control.call_open, answer],
            control.call_open: [call],
            call: [control.call_close],
            control.call_close: [control.im_end],
            answer: [control.im_end],
        },
    )


@pytest.fixture(scope="module")
def rollout(lines, policy):
    """Sixteen episodes of two tasks, and an engine that knows what was forwarded for rehearsals and for the actor."""

    class Watched(Engine):
        rehearsing, forwarded, batches = False, {True: 0, False: 0}, []

        def _forward(self, model, state, tokens, starts):
            self.forwarded[self.rehearsing] += sum(map(len, tokens.values()))
            return super()._forward(model, state, tokens, starts)

        def generate(self, model, prompts, *arguments, **named):
            self.rehearsing = True
            self.batches.append(prompts)
            out = super().generate(model, prompts, *arguments, **named)
            self.rehearsing = False
            return out

    settings = dataclasses.replace(SETTINGS, group_size=8, max_length=700, max_turns=4, look_every=8)
    engine = Watched(
        policy.config, slots=16, max_length=700, vocab_size=lines.vocab_size, min_window=700, compact=False
    )
    world = RehearsalWorld(Simulator(thinking=False))
    two = make_task(2)
    others = [two.messages[0], {"role": "user", "content": "Do another."}, *two.messages[2:]]
    tasks = [make_task(1), dataclasses.replace(two, id="other", messages=others)]
    return run_episodes(engine, policy, lines, tasks, settings=settings, world=world), engine


def test_the_actors_stream_is_extended_and_never_read_again(rollout):
    records, engine = rollout
    actors = [t for t in records if ACT in t.roles]
    assert max(t.generations.max() for t in actors) >= 3
    prompts = {t.group: int((t.roles > 0).argmax()) for t in actors}
    # What is forced where an episode ends stands in its record, and nobody reads it.
    read = [t.roles[: int(np.flatnonzero(t.roles)[-1])] for t in actors]
    later = sum(int((roles == 0).sum()) - prompts[t.group] for roles, t in zip(read, actors, strict=True))
    assert engine.forwarded[False] == sum(prompts.values()) + later > sum(prompts.values())


def test_rehearsals_of_a_task_read_what_their_prompts_share_once_a_batch(rollout):
    records, engine = rollout
    task_of = {t.tokens[: int((t.roles > 0).argmax())].tobytes(): t.group for t in records if REHEARSE in t.roles}
    read = whole = 0
    for batch in engine.batches:
        for task in (0, 1):
            prompts = [prompt.tolist() for prompt in batch if task_of[prompt.tobytes()] == task]
            common = len(os.path.commonprefix(prompts))
            read += common + sum(len(prompt) - common for prompt in prompts)
            whole += sum(map(len, prompts))
    assert sum(map(len, engine.batches)) == sum(REHEARSE in t.roles for t in records) >= 4
    assert engine.forwarded[True] == read < whole


def test_what_was_spared_shows_in_no_record(rollout, policy, lines):
    records, _ = rollout
    width = max(map(len, records))
    tokens = np.zeros((len(records), width), np.int32)
    for row, t in zip(tokens, records, strict=True):
        row[: len(t)] = t.tokens
    expected = np.asarray(token_logps(policy, jnp.asarray(tokens), vocab_size=lines.vocab_size))
    for row, t in zip(expected, records, strict=True):
        at = np.flatnonzero(t.roles)
        np.testing.assert_allclose(t.behavior_logps[at], row[at], rtol=0, atol=1e-4)
