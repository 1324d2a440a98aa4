"""The conversation in the terminal."""

import io
import json

import pytest
from rich.console import Console

from envace_jax.chat import Rehearsal, ToolCall, Turn
from envace_jax.errors import ConfigError
from envace_jax.rehearse import RehearseSettings, Spoken
from envace_jax.rehearse.chat import act, asks_before, mini_task
from envace_jax.rehearse.policy import unanswered
from envace_jax.tasks.mini import Shop


def talk(say, *answers, **more):
    """`envace act` with a policy that says what `say(ask)` is; returns (course, what the screen shows)."""

    class Says:
        def count(self, text):
            return len(text)

        def speak(self, asks):
            return [say(ask) for ask in asks]

    screen = io.StringIO()
    console = Console(file=screen, width=300, force_terminal=True, color_system="standard")
    typed = list(answers)
    console.input = lambda *_: typed.pop(0)
    course = act("m", task="mini:test:0", console=console, load=lambda *_: Says(), **more)
    return course, screen.getvalue()


TASK = mini_task("mini:test:0")
ORDER = TASK.meta["records"][0]["order"]


def cancels(ask):
    """Cancels the first order, expecting that nothing will come of it."""
    if ask.role == "rehearse":
        assert unanswered(ask.messages)
        return Spoken(response=Rehearsal({"rehearsed": True}), tokens=1)
    if ask.messages[-1]["role"] == "user":
        return Spoken(turn=Turn(calls=(ToolCall("cancel_order", {"order": ORDER}),)), tokens=1)
    return Spoken(turn=Turn(content="Done."), tokens=1)


SETTINGS = RehearseSettings(plans=1, memory="vote", max_rehearsals=1)


def test_rehearsals_show_dimmed_and_what_is_done_does_not():
    course, screen = talk(cancels, settings=SETTINGS)
    lines = {line.strip(): line for line in screen.splitlines()}
    rehearsed = next(line for line in lines if '"rehearsed": true' in line)
    assert rehearsed.startswith("\x1b[2m") and "\x1b[2m" not in next(line for line in lines if "result " in line)
    assert "not as rehearsed" in screen and course.finish == "done"
    real = Shop(TASK.meta["records"]).call("cancel_order", {"order": ORDER})
    assert course.decisions[0].real == real


def test_in_a_dry_run_nothing_is_done():
    course, _ = talk(cancels, settings=SETTINGS, dry_run=True)
    assert {json.dumps(d.real) for d in course.decisions if d.call} == {'{"error": "dry run: not executed"}'}


@pytest.mark.parametrize(("answer", "made"), [("y", True), ("", False), ("no", False)])
def test_confirmation_is_asked_before_a_tool_that_changes_something(answer, made):
    course, _ = talk(cancels, *[answer] * 9, settings=RehearseSettings(plans=0), confirm=True)
    assert course.decisions[0].withheld is not made


def test_read_only_tools_need_no_confirmation():
    allow = asks_before({"get_order"}, Console(file=io.StringIO()))
    assert allow(ToolCall("get_order", {}))


def test_a_turn_that_cannot_be_read_is_reported_and_the_conversation_goes_on():
    def mumbles(ask):
        return Spoken(tokens=1)

    course, screen = talk(mumbles, "hello", "again", "", settings=RehearseSettings(plans=2), interactive=True)
    assert screen.count("ended early") == 2
    assert [m["content"] for m in course.messages if m["role"] == "user"] == ["hello", "again"]


def test_decisions_are_kept(tmp_path):
    course, _ = talk(cancels, settings=SETTINGS, record=tmp_path / "d.jsonl")
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == len(course.decisions)


@pytest.mark.parametrize("name", ["mini:test", "mini:moon:1", "shop:test:1", "mini:test:x"])
def test_another_task_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name):
        mini_task(name)
