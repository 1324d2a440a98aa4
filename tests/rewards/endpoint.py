"""An OpenAI-compatible endpoint that misbehaves as it is told: a real HTTP server in a thread."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANALYSES = (
    "high_level_understanding_of_the_question",
    "analysis_of_if_focus_on",
    "analysis_of_pass_condition",
    "analysis_of_failure_examples",
)


def verdict(answer=True, **changes):
    """The text of a verdict by the schema, with changes; a change to None leaves the field out."""
    reply = {**dict.fromkeys(ANALYSES, "as it should be"), "answer": answer} | changes
    return json.dumps({key: value for key, value in reply.items() if value is not None})


def says(text):
    """A reply whose message has this content."""
    return lambda handler: handler.reply(text)


def status(code, **headers):
    def act(handler):
        body = json.dumps({"error": {"message": f"told to answer {code}"}}).encode()
        handler.send(code, body, **headers)

    return act


def body(data, content_type="application/json"):
    """Any bytes with status 200."""
    return lambda handler: handler.send(200, data, content_type=content_type)


def slow(seconds, text):
    """A good reply that comes late."""

    def act(handler):
        time.sleep(seconds)
        handler.reply(text)

    return act


def dripping(seconds):
    """A byte now and then, for ever: no pause is long, the whole is."""

    def act(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)

    return act


def cut(text):
    """Promises more bytes than it sends."""

    def act(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(text) + 500))
        handler.end_headers()
        handler.wfile.write(text.encode())
        handler.close_connection = True

    return act


class Endpoint:
    """`script`: what to do with the first, second, ... request; the last one is done from then on."""

    def __init__(self, *script):
        self.script = list(script) or [says(verdict())]
        self.requests = []  # bodies, in order of arrival
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.asked = request  # for scripts that answer by content
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append(request | {"path": self.path, "key": self.headers["Authorization"]})
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                act = outer.script[min(number, len(outer.script) - 1)]
                try:
                    act(self)
                except OSError:
                    pass  # the client has gone
                finally:
                    with outer._lock:
                        outer._now -= 1

            def reply(self, text):
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                completion = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                self.send(200, json.dumps(completion).encode())

            def send(self, code, data, content_type="application/json", **headers):
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512  # the default, 5, resets connections when a judge asks everything at once

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
