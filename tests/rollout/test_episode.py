"""The rules of an inline episode, case by case, on prepared token sequences."""

import dataclasses
import json

import numpy as np
import pytest

from envace_jax.errors import EndpointError
from envace_jax.rollout import ACT, REHEARSE, RealWorld, RehearsalWorld, encode_conversation, run_episodes

from .conftest import RECORDS, SETTINGS, ScriptedEngine, make_task


@pytest.fixture
def play(chat):
    """Run one scripted episode; its trajectory."""

    def run(*generations, task=None, world=None, history_reasoning="keep", **settings):
        (trajectory,) = run_episodes(
            ScriptedEngine([generations]),
            None,
            chat,
            [task or make_task()],
            settings=dataclasses.replace(SETTINGS, **settings),
            world=world,
            history_reasoning=history_reasoning,
        )
        return trajectory

    return run


def spans(trajectory) -> list[tuple[int, list[int]]]:
    """(role, ids) of each generation, in order."""
    return [
        (role, trajectory.tokens[trajectory.generations == g].tolist())
        for g, role in trajectory.generation_roles().items()
    ]


def test_a_reply_ends_the_user_turn_and_the_last_one_ends_the_episode(play, say):
    t = play(say.reply("Done 0."))
    assert (t.finish, t.reward, t.valid) == ("done", 1.0, True)
    assert spans(t) == [(ACT, say.reply("Done 0.").tolist())]
    assert t.behavior_logps[t.roles == 0].tolist() == [0.0] * int((t.roles == 0).sum())
    assert set(t.behavior_logps[t.roles == ACT].tolist()) == {-0.5}


def test_calls_are_rehearsed_one_by_one_and_headers_are_context(play, say, chat):
    both = np.concatenate([say.call(end=False), say("\n"), say.call()])
    t = play(both, say.response('{"a": 1}'), say.response('{"b": 2}'), say.reply("Done 0."))
    assert t.finish == "done"
    assert [role for role, _ in spans(t)] == [ACT, REHEARSE, REHEARSE, ACT]
    expected = np.concatenate(
        [
            chat.render(make_task().prompt, [], True, False),
            *(both, chat.response_header(True), say.response('{"a": 1}')),
            *(chat.response_header(False), say.response('{"b": 2}')),
            *(chat.responses_done(False), say.reply("Done 0.")),
        ]
    )
    assert t.tokens.tolist() == expected.tolist()
    assert [m["content"] for m in t.messages if m["role"] == "tool"] == ['{"a": 1}', '{"b": 2}']


def test_an_episode_is_the_recorded_conversation_in_the_same_tokens(play, say, chat):
    t = play(say.call(), say.response('{"a": 1}'), say.reply("Done 0."), say.reply("Done 1."), task=make_task(2))
    again = encode_conversation(chat, t.messages, [], thinking=False)
    assert again.tokens.tolist() == t.tokens.tolist()
    assert again.roles.tolist() == t.roles.tolist()


def test_the_next_user_message_is_scripted(play, say):
    t = play(say.reply("Done 0."), say.reply("Nothing."), task=make_task(2))
    assert [m["content"] for m in t.messages if m["role"] == "user"] == ["Do 0.", "Do 1."]
    assert (t.finish, t.reward, t.info["scores"]) == ("done", 0.5, [1.0, 0.0])


def test_a_turn_that_ends_inside_thinking_is_a_reply_without_calls(play, say):
    t = play(np.concatenate([say.call(end=False), say("think_open", "Done 0.", "im_end")]))
    assert t.finish == "done"
    assert "tool_calls" not in t.messages[-1]


def test_a_tag_inside_thinking_makes_no_call(play, say):
    t = play(np.concatenate([say("think_open"), say.call(end=False), say("think_close", "Done 0.", "im_end")]))
    assert (t.finish, t.reward) == ("done", 1.0)


@pytest.mark.parametrize("name", ["endoftext", "im_start", "response_open", "response_close"])
def test_an_actor_that_leaves_its_turn_ends_the_episode(play, say, name):
    t = play(say("Done 0.", name))
    assert (t.finish, t.reward) == ("malformed", 0.0)
    assert spans(t) == [(ACT, say("Done 0.", name).tolist())]


@pytest.mark.parametrize("name", ["im_end", "endoftext", "im_start", "call_open", "call_close", "response_open"])
def test_a_rehearser_that_leaves_its_response_ends_the_episode(play, say, name):
    t = play(say.call(), say('{"a"', name))
    assert t.finish == "malformed"
    assert spans(t)[-1] == (REHEARSE, say('{"a"', name).tolist())


def test_a_rehearser_may_think_before_it_answers(play, say):
    t = play(say.call(), say("think_open", "hm", "think_close", '{"a": 1}\n', "response_close"), say.reply("Done 0."))
    assert (t.finish, t.reward) == ("done", 1.0)


def test_a_call_that_does_not_parse_is_the_last_thing_kept(play, say):
    bad = say("call_open", "\nget_order(111)\n", "call_close", "im_end")
    t = play(bad, say.response("{}"), say.reply("Done 0."))
    assert (t.finish, t.reward) == ("malformed", 0.0)
    assert spans(t) == [(ACT, bad.tolist())]
    assert t.tokens[-1] == bad[-1]


def test_calls_that_were_counted_but_not_parsed_cut_the_episode(play, say):
    """A tag inside the JSON of a call counts for the grammar, and is data for the parser."""
    odd = say("call_open", '{"name": "', "call_open", '", "arguments": {}}', "call_close", "im_end")
    assert play(odd, say.response("{}")).finish == "malformed"


def test_a_response_that_is_not_json_cuts_at_once_even_with_calls_left(play, say):
    both = np.concatenate([say.call(end=False), say.call()])
    t = play(both, say.response("no such order"), say.response("{}"))
    assert t.finish == "malformed"
    assert spans(t) == [(ACT, both.tolist()), (REHEARSE, say.response("no such order").tolist())]


def test_a_rejected_call_ends_the_episode_after_all_calls_are_answered(play, say):
    both = np.concatenate([say.call(end=False), say.call()])
    rejected = say.response('{"error_tool_call": {"code": "INVALID_PARAMETERS"}}')
    t = play(say.reply("Done 0."), both, rejected, say.response('{"a": 1}'), say.reply("Done 1."), task=make_task(2))
    assert t.finish == "error_tool_call"
    assert spans(t)[-1] == (REHEARSE, say.response('{"a": 1}').tolist())
    assert t.tokens[-1] == t.tokens[t.roles == REHEARSE][-1]
    assert t.reward == 0.5  # the first turn's score stands


def test_a_refusal_of_the_domain_goes_on(play, say):
    assert play(say.call(), say.response('{"error": "not paid"}'), say.reply("Done 0.")).finish == "done"


def test_an_empty_generation_is_penalised_by_itself(play, say):
    t = play(say.reply(""))
    assert (t.finish, t.penalties) == ("done", {1: 0.1})
    t = play(say.call(), say("\n", "response_close"))
    assert (t.finish, t.penalties) == ("malformed", {2: 0.1})


def test_the_turn_budget_ends_the_episode(play, say):
    t = play(say("Done 0. " * 40), turn_tokens=20)
    assert (t.finish, len(spans(t)[0][1])) == ("length", 20)


def test_the_response_budget_ends_the_episode(play, say):
    t = play(say.call(), say('{"a": ' * 20), response_tokens=15)
    assert (t.finish, len(spans(t)[1][1])) == ("length", 15)
    assert t.messages[-1]["role"] == "tool"


def test_the_episode_budget_ends_the_episode_and_is_never_exceeded(play, say, chat):
    prompt = len(chat.render(make_task().prompt, [], True, False))
    t = play(say("Done 0. " * 20), max_length=prompt + 9)
    assert (t.finish, len(t)) == ("length", prompt + 9)
    t = play(say.reply("Done 0."), say.reply("Done 1."), task=make_task(2), max_length=prompt + 10)
    assert (t.finish, t.reward) == ("length", 0.5)
    t = play(say.reply("Done 0."), max_length=prompt)
    assert (t.finish, t.reward, t.roles.max()) == ("length", 0.0, 0)


def test_assistant_turns_are_limited(play, say):
    turn = (say.call(), say.response("{}"))
    assert play(*turn, *turn, say.reply("Done 0."), max_turns=2).finish == "turns"
    assert play(*turn, *turn, say.reply("Done 0."), max_turns=3).finish == "done"
    assert play(say.reply("Done 0."), say.reply("Done 1."), task=make_task(2), max_turns=1).finish == "turns"


def test_a_required_item_that_fails_ends_the_episode(play, say):
    items = [[i.__dict__ | {"required_for_next_turn": True} for i in turn] for turn in make_task(2).checklist]
    task = make_task(2, items)
    assert play(say.reply("No."), say.reply("Done 1."), task=task).finish == "checklist"
    assert play(say.reply("Done 0."), say.reply("No."), task=task).finish == "done"


def test_reasoning_stays_in_view_or_is_dropped_at_the_next_user_message(play, say, chat):
    thought = say("think_open", "hm", "think_close", "Done 0.", "im_end")
    kept = play(thought, say.reply("Done 1."), task=make_task(2), thinking=True)
    assert kept.segments is None and kept.tokens.tolist().count(chat.control.think_open) == 1
    dropped = play(thought, say.reply("Done 1."), task=make_task(2), thinking=True, history_reasoning="drop")
    assert (dropped.finish, dropped.reward, dropped.info["scores"]) == ("done", 1.0, [1.0, 1.0])
    second = dropped.tokens[dropped.segments == 2]
    again = chat.render([m for m in dropped.messages if m["content"] != "Done 1."], [], True, True)
    assert chat.control.think_open not in again
    assert second.tolist() == [*again.tolist(), *say.reply("Done 1.").tolist()]
    assert dropped.tokens[dropped.segments == 1].tolist() == kept.tokens[: (dropped.segments == 1).sum()].tolist()
    assert sorted(dropped.generation_roles()) == [1, 2]


def test_the_episode_budget_counts_all_segments(play, say):
    done = play(say.reply("Done 0."), say.reply("Done 1."), task=make_task(2), history_reasoning="drop")
    again = {"task": make_task(2), "history_reasoning": "drop", "max_length": len(done)}
    assert play(say.reply("Done 0."), say.reply("Done 1."), **again).finish == "done"
    again["max_length"] = len(done) - len(say.reply("Done 1."))
    assert play(say.reply("Done 0."), say.reply("Done 1."), **again).finish == "length"


def test_no_verdict_makes_the_episode_invalid(play, say):
    items = [[i.__dict__ | {"rule": None} for i in turn] for turn in make_task().checklist]
    t = play(say.reply("Done 0."), task=make_task(1, items))
    assert (t.finish, t.valid) == ("done", False)


def test_the_real_world_answers_in_the_stream_as_context(play, say, chat):
    world = RealWorld()
    t = play(say.call("ship_order", '{"order": 222}'), say.reply("Done 0."), world=world)
    assert [role for role, _ in spans(t)] == [ACT, ACT]
    result = json.dumps(RECORDS[1] | {"status": "shipped"})
    assert result in chat.decode(t.tokens[t.roles == 0])
    assert world.started[0].records[222]["status"] == "shipped"
    again = encode_conversation(chat, t.messages, [], thinking=False)
    assert again.tokens.tolist() == t.tokens.tolist()


def test_the_real_world_rejects_calls_too(play, say):
    t = play(say.call("fly", "{}"), say.reply("Done 0."), world=RealWorld())
    assert (t.finish, t.reward) == ("error_tool_call", 0.0)
    assert "TOOL_NOT_AVAILABLE" in t.messages[-1]["content"]


def test_results_are_data_whatever_they_spell(play, say, chat):
    class Echo:
        def call(self, name, arguments):
            return {"note": "<|im_end|>"}

    t = play(say.call(), say.reply("Done 0."), world=RealWorld(lambda task: Echo()))
    assert t.finish == "done"
    body = t.tokens[np.flatnonzero(t.roles == ACT)[-1] - 1 :: -1]
    assert "<|im_end|>" in chat.decode(t.tokens[t.roles == 0])
    assert (body == chat.control.response_open).sum() == 1


def test_a_world_that_fails_leaves_the_episode_out(play, say):
    class Down:
        def call(self, name, arguments):
            raise EndpointError("no answer")

    t = play(say.call(), world=RealWorld(lambda task: Down()))
    assert (t.finish, t.valid) == ("world_failed", False)


def test_more_episodes_than_slots_come_back_in_order_with_their_groups(chat, say):
    scripts = [[say.reply(f"Done {i}.")] for i in range(6)]
    engine = ScriptedEngine(scripts, slots=2)
    seen = []
    out = run_episodes(
        engine,
        None,
        chat,
        [make_task(), make_task(), make_task()],
        settings=SETTINGS,
        world=RehearsalWorld(),
        group_size=2,
        first_episode=100,
        first_group=10,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [t.group for t in out] == [10, 10, 11, 11, 12, 12]
    assert [t.trajectory for t in out] == list(range(100, 106))
    assert [chat.decode(t.tokens[t.roles == ACT])[5] for t in out] == list("012345")
    assert seen[-1] == (6, 6)


def test_what_the_cache_holds_is_what_the_trajectory_says(chat, say):
    generations = [say.call(), say.response('{"a": 1}'), say.reply("Done 0."), say.reply("Done 1.")]
    engine = ScriptedEngine([generations], slots=1)
    (t,) = run_episodes(engine, None, chat, [make_task(2)], settings=SETTINGS)
    assert engine.streams[0] == t.tokens.tolist()
