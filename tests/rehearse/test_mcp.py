"""Real tools through the official client, over stdio."""

import io
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from envace_jax.chat import Rehearsal, ToolCall, Turn
from envace_jax.errors import ConfigError, EndpointError
from envace_jax.rehearse import Guarded, RehearseSettings, Spoken
from envace_jax.rehearse.chat import act
from envace_jax.rehearse.mcp import MCPEnvironment, read_result

# The client hands a server a clean environment.
PATHS = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
SERVER = shlex.join(["env", PATHS, sys.executable, str(Path(__file__).with_name("mcp_server.py"))])


@pytest.fixture
def tools():
    pytest.importorskip("mcp")
    with MCPEnvironment(command=SERVER, timeout_s=60) as environment:
        environment._timeout_s = 10
        yield environment


def test_tools_are_listed_called_and_keep_their_state(tools):
    names = [tool["function"]["name"] for tool in tools.tools]
    assert names == ["look", "add", "huge", "hang", "die"] and tools.read_only == {"look"}
    assert "by" in tools.tools[1]["function"]["parameters"]["properties"]
    assert tools.call("add", {"by": 2}) == {"n": 2} and tools.call("look", {}) == {"n": 2}
    assert "error" in tools.call("add", {"by": "x"}) and "error" in tools.call("absent", {})


def test_a_megabyte_is_cut_and_a_silent_or_dying_server_is_an_error_result(tools):
    guarded = Guarded(tools, timeout_s=20, max_bytes=2000)
    assert len(json.dumps(guarded.call("huge", {}))) < 2000
    tools._timeout_s = 2
    assert "no answer within 2 s" in guarded.call("hang", {})["error"]
    assert "error" in guarded.call("die", {})
    assert "error" in guarded.call("look", {})


def test_a_server_that_cannot_be_started_is_named():
    pytest.importorskip("mcp")
    with pytest.raises(EndpointError, match="no-such-program"):
        MCPEnvironment(command="no-such-program --serve", timeout_s=20)


def test_a_server_over_http_is_the_same(tmp_path):
    pytest.importorskip("mcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen([*shlex.split(SERVER), str(port)], stdout=log, stderr=log)
        try:
            _wait_for(port)
            with MCPEnvironment(url=f"http://127.0.0.1:{port}/mcp", timeout_s=30) as environment:
                assert environment.read_only == {"look"}
                assert environment.call("add", {"by": 3}) == {"n": 3} and environment.call("look", {}) == {"n": 3}
                server.kill()
                environment._timeout_s = 5
                assert "error" in environment.call("look", {})
        finally:
            server.kill()
            server.wait()


def _wait_for(port):
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on port {port}")


def test_one_way_to_a_server_is_given():
    for ways in ({}, {"command": "a", "url": "http://b"}):
        with pytest.raises(ConfigError, match="--mcp"):
            MCPEnvironment(**ways)


def test_a_result_is_read_from_what_it_has():
    text = [{"type": "text", "text": '{"a": 1}'}]
    assert read_result({"content": text, "structuredContent": {"b": 2}}) == {"b": 2}
    assert read_result({"content": text}) == {"a": 1}
    assert read_result({"content": [{"type": "text", "text": "hi"}, {"type": "image"}]}) == {"result": "hi\n[image]"}
    assert read_result({"content": text, "isError": True}) == {"error": '{"a": 1}'}


def test_a_server_that_dies_in_the_middle_of_a_plan_leaves_the_conversation_intact():
    """Of add, die and look, what was executed before stays told, what came after is an error, and a reply ends it."""
    pytest.importorskip("mcp")
    plan = [("add", {"by": 4}), ("die", {}), ("look", {})]

    class Planned:
        def count(self, text):
            return len(text)

        def speak(self, asks):
            return [self._say(ask) for ask in asks]

        def _say(self, ask):
            if ask.role == "rehearse":
                return Spoken(response=Rehearsal({"as": "rehearsed"}), tokens=1)
            made = sum(len(m.get("tool_calls") or ()) for m in ask.messages)
            if made < len(plan):
                return Spoken(turn=Turn(calls=(ToolCall(*plan[made]),)), tokens=1)
            return Spoken(turn=Turn(content="Over."), tokens=1)

    console = Console(file=io.StringIO(), width=200)
    typed = iter(["do it", ""])
    console.input = lambda *_: next(typed)
    settings = RehearseSettings(plans=1, memory="vote", max_rehearsals=1)
    course = act("m", mcp=SERVER, settings=settings, timeout_s=30, console=console, load=lambda *_: Planned())
    real = [decision.real for decision in course.decisions if decision.call]
    assert real[0] == {"n": 4} and "error" in real[1] and "error" in real[2]
    assert course.finish == "done" and course.messages[-1]["content"] == "Over."
