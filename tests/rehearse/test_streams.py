"""Streams of a real engine: going on gives what starting anew would, at less cost."""

import dataclasses

import numpy as np
import pytest

from envace_jax.rehearse.streams import Streams, Wanted
from envace_jax.sampling import Engine, SamplingParams, sequence_keys
from tests.sampling.conftest import CONFIG, VOCAB, prompt

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=6)
NAMES = ["a", "b", "c"]
KEYS = dict(zip(NAMES, sequence_keys(0, 0, [0, 1, 2]), strict=True))


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, slots=2, max_length=64, vocab_size=VOCAB)


def wanted(name, tokens):
    return Wanted(name, np.asarray(tokens, np.int32), PARAMS, KEYS[name])


def anew(engine, model, wants):
    """By the engine's own `generate`, which begins every stream with a prefill."""
    out = engine.generate(model, [w.tokens for w in wants], [w.params for w in wants], keys=[w.key for w in wants])
    return [completion.tokens for completion in out]


def sample(streams, wants):
    """All of it: what needs more time is asked for again."""
    found = [None] * len(wants)
    while missing := [i for i, tokens in enumerate(found) if tokens is None]:
        for i, tokens in zip(missing, streams.sample([wants[i] for i in missing]), strict=True):
            found[i] = tokens
    return found


def equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_stream_goes_on_where_it_ended_as_if_it_had_begun_anew(engine, model):
    streams = Streams(engine, model)
    wants = [wanted("a", prompt(9)), wanted("b", prompt(12))]
    equal(first := sample(streams, wants), anew(engine, model, wants))
    longer = [wanted(w.name, np.concatenate([w.tokens, got, prompt(3)])) for w, got in zip(wants, first, strict=True)]
    before = streams.forwarded
    equal(sample(streams, longer), anew(engine, model, longer))
    assert streams.forwarded - before == 6  # the three new tokens of either


def test_another_history_under_the_same_name_begins_anew(engine, model):
    streams = Streams(engine, model)
    sample(streams, [wanted("a", prompt(9))])
    other = [wanted("a", prompt(10)[::-1])]
    equal(sample(streams, other), anew(engine, model, other))


def test_a_third_stream_takes_the_slot_that_was_longest_unused(engine, model):
    streams = Streams(engine, model)
    tokens = {name: prompt(8 + i) for i, name in enumerate(NAMES)}
    for name in ("a", "b", "a", "c"):
        want = wanted(name, tokens[name])
        (got,) = sample(streams, [want])
        equal([got], anew(engine, model, [want]))
        tokens[name] = np.concatenate([tokens[name], got])
    before = streams.forwarded
    sample(streams, [wanted("a", tokens["a"])])
    assert streams.forwarded == before  # it was still there
    sample(streams, [wanted("b", tokens["b"])])
    assert streams.forwarded - before == len(tokens["b"])  # its slot had gone to c


def test_more_streams_than_slots_are_taken_in_turn(engine, model):
    wants = [wanted(name, prompt(8 + i)) for i, name in enumerate(NAMES)]
    equal(sample(Streams(engine, model), wants), anew(engine, model, wants))


def test_a_shared_prompt_is_forwarded_once(engine, model):
    streams = Streams(engine, model)
    wants = [wanted("a", prompt(9)), wanted("b", prompt(9))]
    equal(sample(streams, wants), anew(engine, model, wants))
    assert streams.forwarded == 9


def test_a_budget_is_that_of_each_stream(engine, model):
    streams = Streams(engine, model)
    short = dataclasses.replace(wanted("a", prompt(9)), params=dataclasses.replace(PARAMS, max_new_tokens=2))
    assert [len(tokens) for tokens in sample(streams, [short, wanted("b", prompt(9))])] == [2, 6]


def test_the_short_ones_are_done_before_the_long_ones(engine, model):
    streams = Streams(engine, model)
    short = dataclasses.replace(wanted("a", prompt(9)), params=dataclasses.replace(PARAMS, max_new_tokens=2))
    long = wanted("b", prompt(9))
    first = streams.sample([short, long])
    assert len(first[0]) == 2 and first[1] is None
    equal(sample(streams, [long]), anew(engine, model, [long]))


def test_what_is_not_asked_for_again_is_given_up_and_kept_as_far_as_it_came(engine, model):
    streams = Streams(engine, model)
    short = dataclasses.replace(wanted("a", prompt(9)), params=dataclasses.replace(PARAMS, max_new_tokens=2))
    long = wanted("b", prompt(9))
    streams.sample([short, long])
    (drawn,) = anew(engine, model, [long])
    before = streams.forwarded
    rest = wanted("b", np.concatenate([long.tokens, drawn[:2], prompt(2)]))
    equal(sample(streams, [rest]), anew(engine, model, [rest]))
    assert streams.forwarded - before == 2
