"""Teacher-forced fidelity against a policy whose every answer is known: after a response's header it always writes
`{"a": 1}`, and gives any other line a known probability."""

import json

import numpy as np
import pytest

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer
from envace_jax.evaluate import rehearsals, rehearse_recorded
from envace_jax.sampling import Budgets, Engine, Grammar
from tests.rollout.bigram import Bigram

LINES = ('{"a": 1}\n', '{"a":1}\n', '{"error": "no"}\n', "1\n", "true\n")


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("answers")
    train_tokenizer([*LINES] * 50, 400, directory, pattern=r"[^\n]+\n?|\n+")
    return ChatTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def measure(lines):
    """Measures five calls of two conversations."""
    ids = [int(lines.encode_text(line)[0]) for line in LINES]
    assert all(len(lines.encode_text(line)) == 1 for line in LINES)
    (newline,) = lines.encode_text("\n")
    size = lines.vocab_size
    table = np.full((size, size), -40.0, np.float32)
    table[newline, ids] = np.log([0.5, 0.2, 0.1, 0.1, 0.1])
    table[ids, lines.control.response_close] = 0.0
    policy = Bigram(table)
    engine = Engine(policy.config, slots=4, max_length=256, decode_chunk=8, min_window=256, compact=False)
    grammar = Grammar.from_chat(lines, Budgets(32, 8, 9, 256), enable_thinking=False)

    def call(name):
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}

    def conversation(*answers):
        messages = [{"role": "user", "content": "u"}]
        for name, answer in answers:
            messages += [call(name), {"role": "tool", "content": answer}]
        return [*messages, {"role": "assistant", "content": "done"}], None

    first = conversation(("get", '{"a": 1}'), ("put", '{"a":1}'), ("get", '{"error": "no"}'))
    second = conversation(("put", '{"error": "no"}'), ("get", "1"))
    return lambda: rehearse_recorded(engine, policy, lines, [first, second], grammar, writes=["put"])


@pytest.fixture(scope="module")
def outcomes(measure):
    return measure()


def test_greedy_answers_are_compared_as_json_whatever_their_spelling(outcomes):
    assert [o.exact for o in outcomes] == [True, True, False, False, False]
    assert {json.dumps(json.loads(o.predicted)) for o in outcomes} == {'{"a": 1}'}


def test_the_likelihood_is_that_of_the_real_response(outcomes):
    assert [o.nll for o in outcomes] == pytest.approx([-np.log(p) for p in (0.5, 0.2, 0.1, 0.1, 0.1)], abs=1e-4)
    assert [o.tokens for o in outcomes] == [2] * 5  # the line, and the closing tag


def test_calls_after_a_write_that_took_effect_and_refused_calls_are_marked(outcomes):
    assert [o.case.after_write for o in outcomes] == [False, False, True, False, False]
    assert [o.case.refused for o in outcomes] == [False, False, True, True, False]
    assert [o.case.conversation for o in outcomes] == [0, 0, 0, 1, 1]


def test_long_conversations_are_scored_one_by_one(measure, outcomes, monkeypatch):
    shapes, forward = [], rehearsals._forward

    def spied(graph, params, tokens, segments, vocab_size):
        shapes.append(tokens.shape)
        return forward(graph, params, tokens, segments, vocab_size)

    monkeypatch.setattr(rehearsals, "_forward", spied)
    monkeypatch.setattr(rehearsals, "TOKENS", 128)
    alone = measure()
    assert [rows for rows, _ in shapes] == [1, 1]
    assert [o.exact for o in alone] == [o.exact for o in outcomes]
    assert [o.nll for o in alone] == pytest.approx([o.nll for o in outcomes], abs=1e-5)
