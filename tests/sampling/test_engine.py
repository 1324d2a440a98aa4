"""The engine samples what the model says, whatever else goes on in the batch, and compiles a fixed set of programs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.grpo import token_logps
from envace_jax.sampling import Engine, SamplingParams, sequence_key

from .conftest import CONFIG, VOCAB, prompt

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
RANDOM = SamplingParams(temperature=0.8, max_new_tokens=12, seed=5)


def greedy_reference(model, tokens: np.ndarray, count: int) -> list[int]:
    """Argmax of the whole sequence forwarded anew for every token, without a cache."""
    tokens = list(tokens)
    for _ in range(count):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        hidden, _ = model(jnp.asarray(padded))
        tokens.append(int(np.argmax(np.asarray(model.logits(hidden))[0, len(tokens) - 1, :VOCAB])))
    return tokens[-count:]


def logps_by_trainer(model, context, completion, temperature: float) -> np.ndarray:
    """What the trainer computes for the sampled tokens."""
    tokens = np.concatenate([context, completion.tokens])[None]
    logps = token_logps(model, jnp.asarray(tokens), temperature=temperature, vocab_size=VOCAB)
    return np.asarray(logps)[0, len(context) :]


def same(a, b) -> None:
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logps, b.logps, atol=1e-4)
    assert a.finish_reason == b.finish_reason


def test_greedy_is_the_argmax_of_the_uncached_model(engine, model):
    prompts = [prompt(n) for n in (1, 7, 19)]
    for p, completion in zip(prompts, engine.generate(model, prompts, GREEDY), strict=True):
        assert completion.tokens.tolist() == greedy_reference(model, p, 12)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_logps_are_the_trainers(engine, model, temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=20, seed=1)
    for p, c in zip(*(ps := [prompt(5), prompt(23)], engine.generate(model, ps, params)), strict=True):
        np.testing.assert_allclose(c.logps, logps_by_trainer(model, p, c, temperature or 1.0), atol=1e-4)
        np.testing.assert_array_equal(c.log_kept_mass, 0.0)


def test_a_sample_does_not_depend_on_its_neighbours_slot_or_chunking(engine, model):
    prompts = [prompt(n, seed=n) for n in (9, 40, 3, 17, 26, 70, 33, 5, 12)]  # more than slots: refilled at times
    together = engine.generate(model, prompts, RANDOM)
    key = sequence_key(RANDOM.seed, 0, 5, 0)
    for slot in (0, 3):
        state = engine.prefill(model, engine.start(), {slot: prompts[5]}, {slot: key})
        tokens = []
        while len(tokens) < 12:  # steps of 5, not of the engine's 8
            state, out = engine.decode(model, state, {slot: 12 - len(tokens)}, RANDOM, steps=5)
            tokens += out[slot].tokens.tolist()
        assert tokens == together[5].tokens.tolist()
        assert out[slot].finish_reason == "length"
    other = Engine(CONFIG, slots=2, max_length=96, vocab_size=VOCAB, decode_chunk=32, prefill_chunk=96)
    for a, b in zip(together, other.generate(model, prompts, RANDOM), strict=True):
        same(a, b)


def test_fine_shapes_sample_what_coarse_ones_do(engine, model):
    fine = Engine(
        CONFIG, slots=4, max_length=160, vocab_size=VOCAB, decode_chunk=8, prefill_chunk=32, min_window=64, coarse=False
    )
    assert len(set(fine.shapes.appending())) > len(set(engine.shapes.appending()))
    prompts = [prompt(n, seed=n) for n in (9, 40, 3, 70)]
    ours, theirs = (e.generate(model, prompts, RANDOM) for e in (fine, engine))
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)


def test_the_prompts_index_and_the_seed_decide_the_draw(engine, model):
    p = prompt(8)
    first, second = engine.generate(model, [p, p], RANDOM)
    assert first.tokens.tolist() != second.tokens.tolist()
    again, _ = engine.generate(model, [p, p], RANDOM)
    same(first, again)
    other, _ = engine.generate(model, [p, p], dataclasses.replace(RANDOM, seed=6))
    assert first.tokens.tolist() != other.tokens.tolist()


def test_both_end_ids_stop_and_are_part_of_the_completion(engine, model):
    params = SamplingParams(temperature=1.5, max_new_tokens=80, stop_ids=(11, 12), seed=2)
    completions = engine.generate(model, [prompt(6, i) for i in range(24)], params)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {int(c.tokens[-1]) for c in stopped} == {11, 12}
    for c in completions:
        assert not np.isin(c.tokens[:-1], (11, 12)).any()
        assert c.finish_reason == "stop" or len(c.tokens) == 80


def test_stop_ids_wait_for_min_new_tokens(engine, model):
    stop = greedy_reference(model, prompt(6), 1)[0]  # what would come at once
    params = SamplingParams(temperature=0.0, max_new_tokens=20, stop_ids=(stop,))
    (at_once,) = engine.generate(model, [prompt(6)], params)
    assert at_once.tokens.tolist() == [stop]
    (held,) = engine.generate(model, [prompt(6)], dataclasses.replace(params, min_new_tokens=11))
    assert len(held.tokens) > 11 and stop not in held.tokens[:11]


def test_each_prompt_may_have_its_own_parameters(engine, model):
    prompts = [prompt(6), prompt(9)]
    both = engine.generate(model, prompts, [GREEDY, RANDOM])
    same(both[0], engine.generate(model, prompts, GREEDY)[0])
    same(both[1], engine.generate(model, prompts, RANDOM)[1])


def test_extend_continues_as_if_all_had_been_one_prompt(engine, model):
    whole, key = prompt(75), sequence_key(0, 0, 0)
    state = engine.prefill(model, engine.start(), {1: whole}, {1: key})
    _, expected = engine.decode(model, state, {1: 10}, RANDOM)
    state = engine.prefill(model, engine.start(), {1: whole[:20], 2: whole[:5]}, {1: key, 2: key})
    state = engine.extend(model, state, {1: whole[20:60]})
    state = engine.extend(model, state, {1: whole[60:], 2: whole[5:]})
    _, out = engine.decode(model, state, {1: 10, 2: 10}, RANDOM)
    same(out[1], expected[1])
    same(out[2], expected[1])


def test_decode_after_extend_after_decode_sees_every_token(engine, model):
    state = engine.prefill(model, engine.start(), {0: prompt(6)}, {0: sequence_key(0, 0, 0)})
    state, one = engine.decode(model, state, {0: 7}, GREEDY)
    state = engine.extend(model, state, {0: prompt(11, seed=1)})
    state, two = engine.decode(model, state, {0: 7}, GREEDY)
    context = np.concatenate([prompt(6), one[0].tokens, prompt(11, seed=1)])
    assert two[0].tokens.tolist() == greedy_reference(model, context, 7)


def test_forked_slots_sample_as_their_source_and_share_nothing(engine, model):
    keys = [sequence_key(1, 2, i) for i in range(4)]
    p = prompt(21)
    each = engine.prefill(model, engine.start(), dict.fromkeys(range(4), p), dict(enumerate(keys)))
    _, expected = engine.decode(model, each, dict.fromkeys(range(4), 15), RANDOM)
    state = engine.prefill(model, engine.start(), {2: p}, {2: keys[2]})
    state = engine.fork(state, 2, [0, 3], [keys[0], keys[3]])
    state, source = engine.decode(model, state, {2: 15}, RANDOM)  # the source moves on first
    state = engine.extend(model, state, {2: prompt(30)})
    state, copies = engine.decode(model, state, {0: 15, 3: 15}, RANDOM)
    same(source[2], expected[2])
    same(copies[0], expected[0])
    same(copies[3], expected[3])


def test_prompts_that_begin_alike_are_sampled_as_if_each_were_alone(engine, model, monkeypatch):
    start, key = prompt(30), sequence_key(0, 0, 7)
    prompts = [np.concatenate([start, prompt(n, seed=n)]) for n in (4, 9, 14)] + [start, prompt(12)]
    expected = engine.generate(model, prompts, RANDOM, keys=[key] * 5)
    forwarded = []
    forward = Engine._forward

    def count(self, model, state, tokens, starts):
        forwarded.append({slot: len(new) for slot, new in tokens.items()})
        return forward(self, model, state, tokens, starts)

    monkeypatch.setattr(Engine, "_forward", count)
    for a, b in zip(
        engine.generate(model, prompts, RANDOM, keys=[key] * 5, shared=[30] * 4 + [12]), expected, strict=True
    ):
        same(a, b)
    # Four slots: the start once, then what is each prompt's own; the last prompt comes when a slot is free.
    assert [sorted(tokens.values()) for tokens in forwarded] == [[30], [4, 9, 14], [12]]


def test_the_largest_budgets_begin_first(engine, model, monkeypatch):
    begun = []
    prefill = Engine.prefill_groups

    def record(self, model, state, prompts, keys, shared=None):
        begun.append(sorted(len(prompt) for prompt in prompts.values()))
        return prefill(self, model, state, prompts, keys, shared)

    monkeypatch.setattr(Engine, "prefill_groups", record)
    budgets = (3, 20, 5, 8, 7, 30)
    params = [SamplingParams(max_new_tokens=n, seed=1) for n in budgets]
    out = engine.generate(model, [prompt(n) for n in budgets], params)
    assert [len(completion.tokens) for completion in out] == list(budgets)  # in the order given
    assert begun[0] == [7, 8, 20, 30] and sum(begun[1:], []) == [5, 3]


def test_a_slot_restarts_without_a_trace_of_what_it_held(engine, model):
    state = engine.prefill(model, engine.start(), {0: prompt(90)}, {0: sequence_key(0, 0, 0)})
    state = engine.prefill(model, state, {0: prompt(7)}, {0: sequence_key(0, 0, 0)})
    _, out = engine.decode(model, state, {0: 12}, GREEDY)
    assert out[0].tokens.tolist() == greedy_reference(model, prompt(7), 12)


def test_idle_slots_stand_still_while_others_decode(engine, model):
    keys = {0: sequence_key(0, 0, 0), 1: sequence_key(0, 0, 1)}
    state = engine.prefill(model, engine.start(), {0: prompt(7), 1: prompt(7)}, keys)
    state, _ = engine.decode(model, state, {1: 20}, RANDOM)
    assert np.asarray(state.lengths).tolist() == [7, 27, 0, 0]
    _, out = engine.decode(model, state, {0: 12}, GREEDY)
    assert out[0].tokens.tolist() == greedy_reference(model, prompt(7), 12)


def test_new_parameters_are_used_at_the_next_call(engine, model, other_model):
    for m in (model, other_model, model):
        (c,) = engine.generate(m, [prompt(7)], GREEDY)
        assert c.tokens.tolist() == greedy_reference(m, prompt(7), 12)


def test_a_full_slot_ends_with_length(engine, model):
    (c,) = engine.generate(model, [prompt(157)], SamplingParams(max_new_tokens=50))
    assert (len(c.tokens), c.finish_reason) == (3, "length")


def test_progress_counts_up_to_all(engine, model):
    seen = []
    engine.generate(model, [prompt(4, i) for i in range(7)], GREEDY, progress=lambda *a: seen.append(a))
    done, total = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == 7 and set(total) == {7}


def test_no_prompts_no_completions(engine, model):
    assert engine.generate(model, [], GREEDY) == []


@pytest.mark.parametrize(
    ("bad", "message"), [(prompt(160), "prompt 1 has 160 tokens.*max_length=160"), ([], "prompt 1 has 0")]
)
def test_a_prompt_that_does_not_fit_is_named(engine, model, bad, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(model, [prompt(3), bad], GREEDY)


def test_misuse_of_slots_is_named(engine, model):
    state = engine.start()
    with pytest.raises(ValueError, match="slot 2 is empty and cannot be decoded"):
        engine.decode(model, state, {2: 5}, GREEDY)
    with pytest.raises(ValueError, match="slot 2 is empty and cannot be extended"):
        engine.extend(model, state, {2: prompt(3)})
    with pytest.raises(ValueError, match="slot 7 does not exist"):
        engine.prefill(model, state, {7: prompt(3)}, {7: sequence_key(0, 0, 0)})
    state = engine.prefill(model, state, {2: prompt(150)}, {2: sequence_key(0, 0, 0)})
    with pytest.raises(ValueError, match="slot 2 holds 150 tokens and cannot take 11 more"):
        engine.extend(model, state, {2: prompt(11)})


def test_a_thousand_random_requests_compile_the_programs_of_the_buckets_and_no_other(model, other_model):
    shape = {"slots": 4, "max_length": 64, "decode_chunk": 16, "prefill_chunk": 32, "min_window": 32}
    engine = Engine(CONFIG, vocab_size=VOCAB, compile_ahead=True, **shape)
    rng = np.random.default_rng(0)

    def requests(count):
        prompts = [prompt(int(n), i) for i, n in enumerate(rng.integers(1, 64, count))]
        params = [
            SamplingParams(
                temperature=float(rng.uniform(0, 2)),
                top_p=float(rng.choice([1.0, 0.9])),
                top_k=int(rng.choice([0, 5])),
                max_new_tokens=int(rng.integers(1, 40)),
                stop_ids=tuple(rng.integers(0, VOCAB, rng.integers(0, 4))),
                seed=int(rng.integers(100)),
            )
            for _ in prompts
        ]
        return prompts, params

    # To decode: 4 rows in each window, 2 and 1 in the last. To append: always 4 rows of 32 tokens, such a model being
    # cheap, to fresh streams and to others. To name slots: 1.
    assert engine.shapes.windows == (32, 48, 64)
    engine.generate(model, *requests(1))
    assert engine.compilations == (3 + 1 + 1) + 2 + 1
    for m in (model, other_model, model):
        assert len(engine.generate(m, *requests(350))) == 350
    assert engine.compilations == 8
