"""Fidelity of a policy that answers every call with `{"a": 1}`, in both loops."""

import dataclasses
import json

import numpy as np
import pytest

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer
from envace_jax.errors import ConfigError
from envace_jax.evaluate.fidelity import rehearse_both, summarise
from envace_jax.evaluate.recorded import Conversation, from_record, mini_conversations
from envace_jax.sampling import Engine
from envace_jax.tasks.mini import WRITES
from tests.rollout.bigram import Bigram

LINES = ('{"a": 1}\n', '{"a": 2}\n', '{"error": "no"}\n', "plain\n")


class Spy(Engine):
    prompts: list[np.ndarray] = []

    def generate(self, model, prompts, params, **more):
        Spy.prompts += list(prompts)
        return super().generate(model, prompts, params, **more)


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("answers")
    train_tokenizer([*LINES] * 50, 400, directory, pattern=r"[^\n]+\n?|\n+")
    return ChatTokenizer.from_pretrained(directory)


def conversation(*answers, **more):
    messages = [{"role": "user", "content": "u"}]
    for name, answer in answers:
        call = {"function": {"name": name, "arguments": "{}"}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": answer}]
    return Conversation(messages, None, frozenset({"put"}), **more)


@pytest.fixture(scope="module")
def both(lines):
    ids = [int(lines.encode_text(line)[0]) for line in LINES]
    (newline,) = lines.encode_text("\n")
    table = np.full((lines.vocab_size, lines.vocab_size), -40.0, np.float32)
    table[newline, ids] = np.log([0.5, 0.2, 0.2, 0.1])
    table[ids, lines.control.response_close] = 0.0
    policy = Bigram(table)
    engine = Spy(policy.config, slots=4, max_length=256, decode_chunk=8, min_window=256, compact=False)
    recorded = [
        conversation(("put", '{"a": 2}'), ("get", '{"a": 1}'), ("get", '{"error": "no"}')),
        conversation(("get", '{"a": 1}'), ("get", "plain"), only_last=True),
    ]
    return rehearse_both(engine, policy, lines, recorded, 8)


def test_every_call_is_rehearsed_in_both_loops_and_history_alone_is_not_counted(both):
    for calls in both:
        assert [(r.conversation, r.step) for r in calls] == [(0, 0), (0, 1), (0, 2), (1, 1)]
        assert {r.predicted for r in calls} == {'{"a": 1}'}
        assert [r.real for r in calls] == ['{"a": 2}', '{"a": 1}', '{"error": "no"}', "plain"]


def test_likelihood_is_of_the_real_response_after_the_real_history(both):
    forced, closed = both
    expected = [-np.log(p) for p in (0.2, 0.5, 0.2, 0.1)]
    assert [r.nll for r in forced] == pytest.approx(expected, abs=1e-4)
    assert [r.nll for r in closed] == [None] * 4


def test_in_closed_loop_the_history_holds_what_the_policy_answered(both, lines):
    texts = [lines.decode(prompt) for prompt in Spy.prompts]
    assert any(text.count('{"a": 1}\n</tool_response>') == 2 and '{"a": 2}' not in text for text in texts)


def test_measures_by_step_and_subset(both):
    result = summarise(*both, {"model": "m"})
    value = {name: m.value for name, m in result.measures.items()}
    assert value["forced/exact_match"] == 0.25
    assert value["forced/exact_match/read_after_write"] == 0.5 and value["forced/exact_match/must_fail"] == 0.0
    assert value["closed/exact_match/step_1"] == 0.5 and value["closed/exact_match/step_2"] == 0.0
    assert value["forced/nll"] == pytest.approx(-np.log(0.2 * 0.5 * 0.2 * 0.1) / 8, abs=1e-4)
    # Of "get", the other conversation has "plain" alone for the first, and two for the last.
    assert result.floors["nearest"]["exact_match"] == 0.0


def test_the_embedded_world_has_calls_that_must_fail_and_reads_after_writes():
    found = mini_conversations(4, split="test")
    assert len(found) == 12 and found[0].writes == WRITES
    for probe in found[8:]:
        results = [json.loads(m["content"]) for m in probe.messages if m["role"] == "tool"]
        assert len(results) == 4 and "error" not in results[2]  # the third looks at an order that is there
        assert "error" in results[1] and results[3] == {"error": "no such order"}


def test_a_triple_becomes_a_conversation_of_which_the_last_call_counts():
    history = [{"role": "user", "content": "u"}]
    record = {"tools": [], "history": history, "call": {"name": "get", "arguments": {}}, "response": {"a": 1}}
    made = from_record(record, "f, record 0")
    assert made.only_last and json.loads(made.messages[-1]["content"]) == {"a": 1}
    assert dataclasses.asdict(made)["messages"][:1] == history
    for bad in ({**record, "history": []}, {**record, "call": "get()"}, {"call": {}}):
        with pytest.raises(ConfigError, match="f, record 0"):
            from_record(bad, "f, record 0")
