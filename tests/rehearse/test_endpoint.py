"""A policy behind an OpenAI-compatible endpoint: a real HTTP server in a thread."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from envace_jax.chat import ToolCall
from envace_jax.errors import EndpointError
from envace_jax.rehearse import Ask, EndpointPolicy

USER = {"role": "user", "content": "u"}
CALL = {"type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}


@pytest.fixture
def endpoint():
    """`endpoint(message)`: a policy whose server answers each request with `message`; requests are in `.seen`."""
    servers = []

    def serve(message, code=200):
        seen = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
                usage = {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}
                body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                data = json.dumps(body | {"usage": usage}).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        policy = EndpointPolicy(f"http://127.0.0.1:{server.server_port}/v1", "m")
        policy.seen = seen
        return policy

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_it_acts_by_its_own_tool_calling(endpoint):
    policy = endpoint({"content": None, "tool_calls": [{"id": "x", **CALL}]})
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}]
    (spoken,) = policy.speak([Ask("actor", "act", history, [{"type": "function", "function": {"name": "get"}}])])
    assert spoken.turn.calls == (ToolCall("get", {"a": 1}),) and spoken.tokens == 7
    sent = policy.seen[0]
    assert sent["tools"][0]["function"]["name"] == "get"
    assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"]


def test_it_rehearses_by_a_prompt(endpoint):
    policy = endpoint({"content": '<execution_result>\n{"b": 2}\n</execution_result>'})
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    spoken = policy.speak([Ask("rehearser", "rehearse", history, [])] * 3)
    assert [s.response.value for s in spoken] == [{"b": 2}] * 3
    assert "tools" not in policy.seen[0] and policy.seen[0]["messages"][0]["role"] == "system"


def test_a_refusal_names_the_endpoint(endpoint):
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1.*model m"):
        endpoint({"content": ""}, code=400).speak([Ask("actor", "act", [USER], [])])
