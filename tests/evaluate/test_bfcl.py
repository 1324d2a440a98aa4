"""BFCL's classes as a world: recorded calls are executed one by one, and one that must fail comes last."""

import json
import random
from collections import defaultdict

import pytest

from envace_jax.config import ConfigError
from envace_jax.evaluate.bfcl import CATEGORIES, bfcl_conversations, play_entry, read_call


class Drawer:
    """A tool class in the manner of the package's: public methods, dictionaries as results, errors as values."""

    def __init__(self):
        self.things = {"pen": 2}

    def put(self, name: str, count: int = 1) -> dict:
        self.things[name] = self.things.get(name, 0) + count
        return {"count": self.things[name]}

    def look(self, name: str) -> dict:
        return {"count": self.things[name]} if name in self.things else {"error": f"no {name}"}

    def total(self) -> int:
        return sum(self.things.values())

    def _hidden(self):
        raise AssertionError("a private method is no tool")


TURNS = [[{"role": "user", "content": "Put a cup there."}], [{"role": "user", "content": "And now?"}]]
TRUTH = [["put('cup', count=3)", "look(name='cup')"], ["total()"]]


def played():
    return play_entry([Drawer()], TURNS, TRUTH, random.Random(0))


def test_calls_are_executed_in_order_on_one_state():
    messages, _ = played()
    assert [m["role"] for m in messages[:8]] == ["user", *["assistant", "tool"] * 2, "user", "assistant", "tool"]
    assert [m["content"] for m in messages if m["role"] == "tool"][:3] == ['{"count": 3}', '{"count": 3}', "5"]
    first = messages[1]["tool_calls"][0]["function"]
    assert first["name"] == "put" and json.loads(first["arguments"]) == {"name": "cup", "count": 3}


def test_the_last_call_is_one_of_them_that_the_world_refuses():
    messages, calls = played()
    assert calls[-1].name == "look" and json.loads(messages[-1]["content"])["error"].startswith("no missing_")


def test_what_changes_the_state_is_a_write():
    _, calls = played()
    assert [made.wrote for made in calls] == [True, False, False, False]


def test_an_exception_is_an_answer():
    messages, _ = play_entry([Drawer()], TURNS[:1], [["put(name=7, count='x')"]], random.Random(0))
    assert messages[-1]["content"].startswith("Error during execution: ")


@pytest.mark.parametrize("expression", ["unknown(1)", "look.name('x')", "1 + 1", "__import__('os').system('x')"])
def test_only_calls_of_known_functions_are_read(expression):
    with pytest.raises(ValueError, match="not the call of a known function"):
        read_call(expression, {"look": Drawer().look})


def test_an_unknown_category_is_refused_by_name():
    with pytest.raises(ConfigError, match="base, long_context"):
        bfcl_conversations("multi_turn_base")


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_package_answers_as_recorded(category, shared_dir):
    pytest.importorskip("bfcl_eval")
    recorded = defaultdict(list)
    for record in json.loads((shared_dir / "data" / "bfcl_triples.json").read_text()):
        recorded[record["id"]].append(record["response"])
    conversations = bfcl_conversations(category, 40)
    for number, conversation in enumerate(conversations):
        got = [m["content"] for m in conversation.messages if m["role"] == "tool"]
        want = recorded[f"multi_turn_{category}_{number}"]
        assert got[: len(want)] == want
    assert {"cd", "mkdir"} <= conversations[0].writes and "ls" not in conversations[0].writes
    failing = [c for c in conversations if "error" in c.messages[-1]["content"].lower()]
    assert len(failing) > 35
