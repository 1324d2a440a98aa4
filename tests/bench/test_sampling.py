"""What the sampling benches take as their bound, their lengths and their policy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bench.batch_mix import make_lengths
from bench.decode import aim
from bench.rollout import CODES, make_policy, turns
from bench.sampling import CONFIG, bound_seconds, summary
from envace_jax.rollout.trajectory import ACT, REHEARSE, TokenStream


def test_the_bound_is_that_of_the_products_alone():
    # By hand: a layer has 512 x (16 + 8) x 64 + 3 x 512 x 1536 weights, the head 8192 x 512; two operations each.
    layers, head = 8 * 3_145_728, 4_194_304
    expected = 2 * layers * 2048 / 100e9 + 2 * (layers + head) * 2048 / 54e9
    assert bound_seconds(2048, 2048, (100e9, 54e9)) == pytest.approx(expected)
    found = summary("decode", 2048, {"envace_jax": [4.0, 5.0, 9.0], "hf": [6.0, 6.5, 7.0]}, 2.5)
    assert (found["tok_s"], found["bound_tok_s"], found["of_bound"]) == (409.6, 819.2, 0.5)
    assert found["ratio"] == {"hf": 1.3}


@pytest.mark.parametrize(
    "ours, hf, tunix, goal, met", [(640, 446, 512, 665.6, False), (670, 446, 512, 665.6, True), (700, 900, 512, 680, 1)]
)
def test_the_aim_is_the_lower_of_the_best_peer_and_the_bound(ours, hf, tunix, goal, met):
    found = aim({"tok_s": ours, "bound_tok_s": 800.0, "others_tok_s": {"hf": hf, "tunix": tunix}})
    assert found == {"aim_tok_s": pytest.approx(goal), "met": bool(met)}
    assert aim({"tok_s": ours, "bound_tok_s": 800.0, "others_tok_s": {}}) == {}


@pytest.mark.parametrize("requests", [32, 64, 256])
def test_the_longest_request_is_four_times_the_mean(requests):
    lengths = make_lengths(requests, 64)
    assert len(lengths) == requests and min(lengths) >= 1
    assert np.mean(lengths) == pytest.approx(64, abs=1)
    assert max(lengths) == pytest.approx(4 * 64, rel=0.02)
    assert lengths == make_lengths(requests, 64)


def test_the_policy_draws_what_follows_the_last_token_and_nothing_else():
    config = dataclasses.replace(
        CONFIG, hidden_size=160, intermediate_size=32, num_hidden_layers=2, vocab_size=50, tie_word_embeddings=False
    )
    follows = {3: [7], 7: [8, 9], 8: [3], 9: [3]}
    model = make_policy(config, follows)
    tokens = np.array([[3, 7, 9, 3, 7, 8]], np.int32)
    hidden, _ = model(jnp.asarray(tokens))
    scores = np.asarray(model.logits(hidden))[0]
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    for at, token in enumerate(tokens[0].tolist()):
        np.testing.assert_allclose(probabilities[at, follows[token]], 1 / len(follows[token]), atol=0.05)
    with pytest.raises(ValueError, match=f"{CODES + 1} tokens of the script"):
        make_policy(config, dict.fromkeys(range(CODES + 1), [1]))


def test_the_peer_is_asked_for_each_generation_behind_all_that_came_before():
    episodes = []
    for more in (0, 2):
        stream = TokenStream()
        stream.context(np.arange(10 + more))
        for number in range(8):
            size = 3 + number + more
            stream.generation((ACT, REHEARSE)[number % 2], np.arange(size), np.zeros(size))
            stream.context(np.arange(2))
        episodes.append(stream.finish())
    batches = turns(episodes)
    assert batches[0] == [[10, 12], [3, 5]]
    assert batches[1] == [[15, 19], [4, 6]]
    assert len(batches) == 8
