"""Private plans, their memory, and what is committed; policies and environments are scripted."""

import inspect
import json
import time

import pytest

from envace_jax.chat import ParseError, Rehearsal, ToolCall, Turn
from envace_jax.errors import ConfigError
from envace_jax.rehearse import (
    Course,
    Guarded,
    Plan,
    Rehearsed,
    RehearseSettings,
    Spoken,
    act_task,
    act_turn,
    condense,
    drive,
    memory,
    plans,
    policy,
    rehearse,
    save_decisions,
    vote,
)

PROMPT = [{"role": "system", "content": "s"}, {"role": "user", "content": "do it"}]
POLICIES = ("actor", "planner", "rehearser")


def call(name="get", **arguments):
    return ToolCall(name, arguments)


def turn(*calls, reply=""):
    return Spoken(turn=Turn(content=reply, calls=calls), tokens=5)


class Scripted:
    """Asks get the next of `turns` (by who asks) or the response that `world` gives to a call."""

    def __init__(self, world=lambda name, arguments: {"ok": 1}, **turns):
        self.world, self.turns, self.asked, self.batches = world, {k: list(v) for k, v in turns.items()}, [], []
        self.environment = None

    def count(self, text):
        return len(text.split())

    def speak(self, asks):
        self.asked += asks
        self.batches.append([(ask.who, ask.role) for ask in asks])
        return [self._one(ask) for ask in asks]

    def _one(self, ask):
        if ask.role == "rehearse":
            function = policy.unanswered(ask.messages)[0]
            value = self.world(function["name"], json.loads(function["arguments"]))
            return Spoken(response=Rehearsal(value), tokens=2)
        return self.turns[ask.who].pop(0)


class Real:
    def __init__(self, world=lambda name, arguments: {"ok": 1}):
        self.world, self.made = world, []

    def call(self, name, arguments):
        self.made.append((name, dict(arguments)))
        return self.world(name, arguments)


def run(scripted, real, settings, users=("do it",)):
    speech = act_task(PROMPT, users, [], real, settings, scripted)
    return drive(speech, dict.fromkeys(POLICIES, scripted))


def plan(*results, reply="done", outcome="done", critique=""):
    made = tuple(Rehearsed(call(name, **arguments), result) for name, arguments, result in results)
    return Plan((made,) if made else (), reply, outcome, critique)


GET = ("get", {"id": 1}, {"x": "abc"})
PUT = ("put", {"id": 1}, {"x": "new"})


def test_nothing_rehearsed_reaches_the_real_environment():
    """A spy on the real environment sees the committed calls alone, though the plans made others, and more of them."""
    scripted = Scripted(planner=[turn(call("wipe")), turn(call("wipe")), turn(reply="p"), turn(reply="p")])
    scripted.turns["actor"] = [turn(call("get", id=1)), turn(reply="r")]
    real = Real()
    course = run(scripted, real, RehearseSettings(plans=2))
    assert real.made == [("get", {"id": 1})]
    assert [d.call for d in course.decisions] == [call("get", id=1), None]


def test_the_rehearsing_code_has_no_way_to_take_an_environment():
    for module in (plans, memory, policy):
        source = inspect.getsource(module)
        assert "envace_jax.rehearse.commit" not in source and "envace_jax.tasks" not in source
        for _, function in inspect.getmembers(module, inspect.isfunction):
            assert not {"environment", "env", "world", "shop"} & set(inspect.signature(function).parameters)


def test_parallel_plans_are_sampled_in_one_batch_and_do_not_see_each_other():
    scripted = Scripted(planner=[turn(call()), turn(call()), turn(call()), *[turn(reply="p")] * 3])
    found = drive(
        rehearse(PROMPT, [], RehearseSettings(plans=3), scripted), {"planner": scripted, "rehearser": scripted}
    )
    assert [len(batch) for batch in scripted.batches] == [3, 3, 3]
    assert len({ask.sequence for ask in scripted.asked}) == 3
    assert all(ask.messages[:2] == PROMPT for ask in scripted.asked)
    assert [p.reply for p in found] == ["p"] * 3 and found[0].tokens == 5 + 2 + 5


def test_sequential_plans_see_the_earlier_ones_and_their_critique():
    scripted = Scripted(planner=[turn(call(id=7)), turn(reply="first"), turn(reply="too hasty"), turn(reply="second")])
    scripted.turns["planner"] += [turn(reply="fine")]
    settings = RehearseSettings(plans=2, mode="sequential")
    found = drive(rehearse(PROMPT, [], settings, scripted), {"planner": scripted, "rehearser": scripted})
    assert [p.reply for p in found] == ["first", "second"] and found[0].critique == "too hasty"
    second = next(a for a in scripted.asked if a.sequence == 2).messages[-1]["content"]
    assert second.startswith("do it\n") and 'get({"id": 7}) -> {"ok": 1}' in second and "review: too hasty" in second


def test_another_policy_may_rehearse():
    actor, base = Scripted(planner=[turn(call()), turn(reply="p")], actor=[turn(reply="r")]), Scripted()
    speech = act_task(PROMPT, ["do it"], [], Real(), RehearseSettings(plans=1), actor)
    drive(speech, {"planner": actor, "actor": actor, "rehearser": base})
    assert {(a.who, a.role) for a in base.asked} == {("rehearser", "rehearse")}
    assert {a.who for a in actor.asked} == {"planner", "actor"}


def test_without_plans_the_actor_acts_and_nothing_is_rehearsed():
    scripted = Scripted(actor=[turn(call()), turn(reply="r")])
    course = run(scripted, Real(), RehearseSettings(plans=0))
    assert {a.who for a in scripted.asked} == {"actor"}
    assert (course.rehearsals, course.plan_tokens, course.act_tokens) == (0, 0, 10)


def test_the_memory_stands_before_the_actor_and_never_in_the_record():
    scripted = Scripted(planner=[turn(call(id=3)), turn(reply="p")], actor=[turn(reply="r")])
    course = run(scripted, Real(), RehearseSettings(plans=1))
    acting = [a for a in scripted.asked if a.who == "actor"]
    assert 'get({"id": 3})' in acting[0].messages[-1]["content"]
    assert course.messages == [*PROMPT, {"role": "assistant", "content": "r"}]
    assert course.decisions[0].plans[0].reply == "p"


def test_where_reality_departs_the_rest_is_rehearsed_again():
    """The plan has two calls in one turn; the first has another result than rehearsed, so the second is not made."""
    planner = [turn(call(id=1), call("put", id=1)), turn(reply="p"), turn(reply="cannot")]
    real = Real(lambda name, arguments: {"error": "gone"})
    course = run(Scripted(planner=planner), real, RehearseSettings(plans=1, memory="vote"))
    assert real.made == [("get", {"id": 1})]
    first, last = course.decisions
    assert first.departed and first.rehearsed == ({"ok": 1},) and first.real == {"error": "gone"}
    assert (last.reply, last.round, course.rehearsals, course.departures) == ("cannot", 2, 2, 1)
    assert (
        course.messages[2]["tool_calls"][0]["function"]["name"] == "get" and len(course.messages[2]["tool_calls"]) == 1
    )


def test_while_reality_agrees_one_rehearsal_serves_the_whole_turn():
    planner = [turn(call(id=1), call("put", id=1)), turn(call("put", id=2)), turn(reply="p")]
    real = Real()
    course = run(Scripted(planner=planner), real, RehearseSettings(plans=1, memory="vote"))
    assert [name for name, _ in real.made] == ["get", "put", "put"]
    assert course.rehearsals == 1 and course.messages[-1]["content"] == "p" and course.act_tokens == 0


def test_scope_call_rehearses_before_every_call():
    planner = [turn(call(id=1)), turn(reply="p"), turn(reply="q")]
    course = run(Scripted(planner=planner), Real(), RehearseSettings(plans=1, memory="vote", scope="call"))
    assert course.rehearsals == 2 and course.messages[-1]["content"] == "q"


def test_rehearsals_of_a_turn_are_bounded_then_the_actor_goes_on_alone():
    planner = [turn(call(id=1)), turn(reply="p")] * 2
    real = Real(lambda name, arguments: {"n": len(real.made)})
    settings = RehearseSettings(plans=1, memory="vote", max_rehearsals=2)
    course = run(Scripted(planner=planner, actor=[turn(reply="enough")]), real, settings)
    assert course.rehearsals == 2 and course.messages[-1]["content"] == "enough"


@pytest.mark.parametrize(
    ("spoken", "outcome"),
    [
        (Spoken(tokens=9), "length"),
        (Spoken(turn=Turn(error=ParseError("MALFORMED_JSON", "?"))), "malformed"),
        (turn(call("get")), "turns"),
    ],
)
def test_a_rehearsal_that_never_ends_well_ends_all_the_same(spoken, outcome):
    scripted = Scripted(planner=[spoken] * 3)
    settings = RehearseSettings(plans=1, max_turns=3)
    (found,) = drive(rehearse(PROMPT, [], settings, scripted), {"planner": scripted, "rehearser": scripted})
    assert found.outcome == outcome


def test_the_vote_goes_to_the_plan_that_most_agree_with():
    odd = plan(PUT, reply="other")
    assert vote([odd, plan(GET), plan(GET)]) == 1
    assert vote([plan(GET, outcome="length"), plan(GET, outcome="length"), odd]) == 2
    assert vote([plan(GET), odd]) == 0  # the first of equals


def test_the_memory_keeps_its_budget_and_drops_the_detail_of_the_oldest_first():
    def words(text):
        return len(text.split())

    three = [plan(GET, critique="old review"), plan(GET, PUT), plan(GET)]
    full = condense(three, None, words)
    assert full.detail == (3, 3, 3) and "old review" in full.text
    assert (
        "Most plans make: get" in full.text
        and "(3 of 3)" in full.text
        and "3 of 3 plans end by saying: done" in full.text
    )
    less = condense(three, full.tokens - 1, words)
    assert less.detail == (2, 3, 3) and less.tokens < full.tokens and "old review" not in less.text
    for budget in range(full.tokens):
        assert condense(three, budget, words).tokens <= budget
    many = condense(three * 20, full.tokens, words)
    assert many.tokens <= full.tokens and "(60 of 60)" in many.text and many.detail[0] <= many.detail[-1]
    assert condense([], 10, words).text == condense(three, 0, words).text == ""


def test_braces_in_what_was_rehearsed_are_no_template():
    text = condense([plan(("get", {}, {"x": "{notes} {0}"}))], None, len).text
    assert '"{notes} {0}"' in text


def test_a_call_that_is_not_allowed_is_not_made_and_the_policy_is_told():
    scripted, real = Scripted(actor=[turn(call("put")), turn(reply="r")]), Real()
    course = Course(list(PROMPT))
    speech = act_turn(course, [], real, RehearseSettings(plans=0), scripted, allow=lambda c: c.name != "put")
    drive(speech, dict.fromkeys(POLICIES, scripted))
    assert real.made == [] and course.decisions[0].withheld
    assert "did not allow" in course.messages[3]["content"] and course.finish == "done"


def test_decisions_are_lines_of_json(tmp_path):
    scripted = Scripted(planner=[turn(call(id=3)), turn(reply="p")], actor=[turn(call(id=3)), turn(reply="r")])
    course = run(scripted, Real(), RehearseSettings(plans=1))
    save_decisions(course.decisions, tmp_path / "d.jsonl")
    first, second = map(json.loads, (tmp_path / "d.jsonl").read_text().splitlines())
    assert first["call"] == {"name": "get", "arguments": {"id": 3}} and first["rehearsed"] == [{"ok": 1}]
    assert first["plans"][0]["turns"][0][0]["result"] == {"ok": 1} and second["plans"] == []


def test_an_environment_is_bounded_in_time_and_size_and_never_raises():
    def world(name, arguments):
        if name == "slow":
            time.sleep(5)
        if name == "dies":
            raise ConnectionError("broken pipe")
        return {"big": "x" * 1_000_000, "odd": {1, 2}}.get(name, {"ok": 1})

    guarded = Guarded(Real(world), timeout_s=0.2, max_bytes=1000)
    assert guarded.call("get", {}) == {"ok": 1}
    assert "no answer within" in guarded.call("slow", {})["error"]
    assert "broken pipe" in guarded.call("dies", {})["error"]
    assert "1000002 bytes" in (big := guarded.call("big", {}))["error"] and len(json.dumps(big)) < 1000
    assert "not JSON" in guarded.call("odd", {})["error"]


def test_settings_that_cannot_be_meant_are_refused():
    for wrong in ({"mode": "both"}, {"scope": "day"}, {"memory": "none"}, {"plans": -1}, {"memory_tokens": -1}):
        with pytest.raises(ConfigError, match="rehearse"):
            RehearseSettings(**wrong)


class OneAtATime:
    """Says what it was asked, to the first ask of each batch only."""

    def __init__(self):
        self.batches = []

    def speak(self, asks):
        self.batches.append([ask.sequence for ask in asks])
        return [Spoken(turn=Turn(content=str(asks[0].sequence)))] + [None] * (len(asks) - 1)


def asking(first, count):
    """A speech that says `count` things, one after the other."""
    said = []
    for number in range(first, first + count):
        spoken = yield from policy.say(policy.Ask("actor", "act", PROMPT, [], sequence=number))
        said.append(spoken.turn.content)
    return said


def test_nobody_waits_for_the_others_to_be_answered():
    slow = OneAtATime()
    # The last two stand for two plans of one task: each of them, too, goes on by itself.
    speeches = [asking(10, 2), asking(20, 1), policy.together([asking(30, 2), asking(40, 1)])]
    assert drive(policy.together(speeches), {"actor": slow}) == [["10", "11"], ["20"], [["30", "31"], ["40"]]]
    assert slow.batches[:3] == [[10, 20, 30, 40], [11, 20, 30, 40], [20, 30, 40]]


def test_a_policy_of_several_names_is_asked_for_all_of_them_at_once():
    scripted = Scripted(actor=[turn(reply="a")], planner=[turn(reply="p")])
    speeches = [policy.say(policy.Ask(who, "act", PROMPT, [])) for who in ("actor", "planner")]
    found = drive(policy.together(speeches), {"actor": scripted, "planner": scripted})
    assert [spoken.turn.content for spoken in found] == ["a", "p"] and len(scripted.batches) == 1
