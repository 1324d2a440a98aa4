"""The LLM judge against a real server: a verdict is a boolean by the schema or it is none, and none is never a zero."""

import socket
import threading
import time

import pytest

from envace_jax.rewards import LLMJudge, Question, RoutedJudge, Step, VerdictCache, judge_turn
from envace_jax.tasks import parse_task
from tests.rewards.endpoint import ANALYSES, Endpoint, body, cut, dripping, says, slow, status, verdict

YES, NO = says(verdict(True)), says(verdict(False))


@pytest.fixture
def serve():
    """serve(*script) -> an `Endpoint`."""
    running = []

    def start(*script):
        running.append(Endpoint(*script))
        return running[-1]

    yield start
    for endpoint in running:
        endpoint.close()


@pytest.fixture
def ask():
    """ask(endpoints, questions=1, **settings) -> (answers, metrics); the pauses are short."""
    judges = []

    def call(*endpoints, questions=1, **settings):
        if not isinstance(questions, list):
            questions = [make_question(f"reply {i}") for i in range(questions)]
        urls = [getattr(e, "url", e) for e in endpoints]
        judges.append(LLMJudge(urls, "judge-model", **{"backoff_s": 0.002, "backoff_cap_s": 0.05, **settings}))
        call.judge = judges[-1]
        return judges[-1].answer(questions), judges[-1].metrics()

    yield call
    for judge in judges:
        judge.close()


def make_question(reply="Done.", history=(), **item):
    base = {"id": "a", "question": "Is it done?", "focus_on": "assistant.content", "pass_condition": "says so"}
    task = parse_task(
        {
            "uuid": "t1",
            "messages": [{"role": "user", "content": "Do it."}],
            "tools": [],
            "checklists": [[[base | {"weight": 1.0} | item]]],
        }
    )
    history = [*history, {"role": "user", "content": "Do it."}]
    step = Step({"role": "assistant", "content": reply})
    return Question(task, 0, 0, task.checklist[0][0], history, [step], ends_turn=True)


def test_true_and_false_are_verdicts(serve, ask):
    endpoint = serve(YES)
    assert ask(endpoint)[0] == [True]
    assert ask(serve(NO))[0] == [False]
    assert ask(endpoint, questions=[])[0] == []


def test_answers_come_in_the_order_of_the_questions(serve, ask):
    # One at a time, so that the latest request is the one being answered.
    endpoint = serve(lambda h: h.reply(verdict("reply 3" in endpoint.requests[-1]["messages"][1]["content"])))
    questions = [make_question(f"reply {i}") for i in range(6)]
    assert ask(endpoint, questions=questions, max_in_flight=1)[0] == [False, False, False, True, False, False]


BROKEN = {
    "half a JSON": says(verdict()[:60]),
    "yes instead of true": says(verdict("yes")),
    "1 instead of true": says(verdict(1)),
    "null": says(verdict(answer=None, extra=1)),
    "a missing analysis": says(verdict(**{ANALYSES[2]: None})),
    "an analysis that is no text": says(verdict(**{ANALYSES[0]: 3})),
    "a list": says("[true]"),
    "a bare boolean": says("true"),
    "text around it": says(f"Here you are: {verdict()}"),
    "nothing": says(""),
    "no content": says(None),
    "HTTP 500": status(500),
    "HTTP 429": status(429),
    "HTTP 503": status(503),
    "a body that is no JSON": body(b"<html>busy</html>", "text/html"),
    "half a body": body(b'{"choices": [{"mess'),
    "no choices": body(b'{"choices": []}'),
    "a body of another kind": body(b"[1]"),
    "a connection that breaks": cut('{"choices": ['),
}


@pytest.mark.parametrize("act", BROKEN.values(), ids=BROKEN)
def test_what_is_no_verdict_is_tried_again_and_then_is_none(serve, ask, act):
    endpoint = serve(act)
    answers, metrics = ask(endpoint, tries=3)
    assert answers == [None]
    assert len(endpoint.requests) == 3
    wanted = {"judge/questions": 1, "judge/requests": 3, "judge/retries": 2, "judge/no_verdict": 1}
    assert {name: metrics[name] for name in wanted} == wanted
    assert ask.judge.last_error.startswith(endpoint.url)


@pytest.mark.parametrize("act", BROKEN.values(), ids=BROKEN)
def test_one_failure_costs_a_try_and_no_verdict(serve, ask, act):
    endpoint = serve(act, NO)
    answers, metrics = ask(endpoint)
    assert answers == [False] and metrics["judge/no_verdict"] == 0 and metrics["judge/retries"] == 1


def test_the_release_tries_five_times(serve, ask):
    endpoint = serve(status(500))
    assert ask(endpoint)[0] == [None] and len(endpoint.requests) == 5


@pytest.mark.parametrize("act", [slow(60, verdict()), dripping(60)], ids=["late", "dripping"])
def test_a_request_that_takes_too_long_is_given_up(serve, ask, act):
    endpoint = serve(act)
    began = time.monotonic()
    answers, metrics = ask(endpoint, tries=2, timeout_s=0.3)
    assert answers == [None] and metrics["judge/requests"] == 2
    assert time.monotonic() - began < 30
    assert "no reply within 0.3 s" in ask.judge.last_error


def test_a_slow_answer_within_the_timeout_counts(serve, ask):
    answers, metrics = ask(serve(slow(0.3, verdict())), timeout_s=20)
    assert answers == [True] and metrics["judge/retries"] == 0 and metrics["judge/seconds"] >= 0.3


def test_nobody_at_the_address(ask):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        answers, _ = ask(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", tries=2)
    assert answers == [None]


def test_a_request_that_is_refused_for_good_is_not_repeated(serve, ask):
    endpoint = serve(status(401))
    answers, metrics = ask(endpoint)
    assert answers == [None] and metrics["judge/requests"] == 1 and "401" in ask.judge.last_error


def test_endpoints_take_turns(serve, ask):
    first, second = serve(YES), serve(YES)
    ask(first, second, questions=10)
    assert (len(first.requests), len(second.requests)) == (5, 5)


def test_another_endpoint_is_tried_when_one_fails(serve, ask):
    dead, refusing, alive = serve(status(500)), serve(status(404)), serve(YES)
    assert ask(dead, refusing, alive, questions=3)[0] == [True, True, True]
    assert len(alive.requests) >= 3


def test_pauses_grow_and_heed_the_server(serve, ask):
    began = time.monotonic()
    ask(serve(status(500)), tries=4, backoff_s=0.1, backoff_cap_s=1.0)
    assert 0.5 * (0.1 + 0.2 + 0.4) <= time.monotonic() - began
    began = time.monotonic()
    ask(serve(status(429, Retry_After="0.6"), YES), backoff_s=0.001, backoff_cap_s=1.0)
    assert time.monotonic() - began >= 0.6


def test_no_more_requests_at_a_time_than_allowed_however_many_ask(serve):
    endpoint = serve(slow(0.03, verdict()))
    judge = LLMJudge([endpoint.url], "m", max_in_flight=3)
    threads = [
        threading.Thread(target=judge.answer, args=([make_question(f"{t} {i}") for i in range(5)],)) for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    judge.close()
    assert len(endpoint.requests) == 20 and endpoint.most_at_once == 3


def test_the_request_is_that_of_the_release(serve, ask):
    endpoint = serve(YES)
    ask(endpoint, api_key="secret")
    (request,) = endpoint.requests
    assert request["path"] == "/v1/chat/completions" and request["key"] == "Bearer secret"
    sampling = {k: request[k] for k in ("model", "temperature", "top_p", "max_tokens")}
    assert sampling == {"model": "judge-model", "temperature": 0.6, "top_p": 0.8, "max_tokens": 6000}
    asked = request["response_format"]["json_schema"]
    assert asked["strict"] is True and asked["schema"]["properties"]["answer"] == {"type": "boolean"}
    assert asked["schema"]["required"] == [*ANALYSES, "answer"]


def test_thinking_before_the_verdict_is_put_aside(serve, ask):
    assert ask(serve(says(f"<think>\nhm {{\n</think>\n\n{verdict(False)}")))[0] == [False]


# What was answered once is not asked again.


def test_a_resumed_run_asks_nothing_twice(serve, ask, tmp_path):
    endpoint = serve(YES, NO)
    questions = [make_question("one"), make_question("two")]
    first, _ = ask(endpoint, questions=questions, cache=VerdictCache(tmp_path / "v.jsonl"), max_in_flight=1)
    again, metrics = ask(endpoint, questions=questions, cache=VerdictCache(tmp_path / "v.jsonl"))
    assert sorted(first) == [False, True] and again == first
    assert len(endpoint.requests) == 2 and metrics["judge/cache_hits"] == 2 and metrics["judge/requests"] == 0


def test_equal_questions_at_the_same_time_are_asked_once(serve, ask):
    endpoint = serve(slow(0.1, verdict()))
    assert ask(endpoint, questions=[make_question("same")] * 8)[0] == [True] * 8
    assert len(endpoint.requests) == 1


def test_no_verdict_is_not_kept(serve, ask, tmp_path):
    endpoint = serve(status(500), YES)
    ask(endpoint, tries=1, cache=VerdictCache(tmp_path / "v.jsonl"))
    assert ask(endpoint, tries=1, cache=VerdictCache(tmp_path / "v.jsonl"))[0] == [True]


@pytest.mark.parametrize(
    "change",
    [
        {"question": "Is it?"},
        {"pass_condition": "else"},
        {"failure_examples": ["x"]},
        {"history": ({"role": "system", "content": "s"},)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_content_is_another_question(serve, ask, tmp_path, change):
    endpoint, cache = serve(YES), VerdictCache(tmp_path / "v.jsonl")
    ask(endpoint, questions=[make_question(), make_question(**change)], cache=cache)
    assert len(endpoint.requests) == 2


def test_another_model_or_temperature_is_another_question(serve, ask, tmp_path):
    endpoint = serve(YES)
    for temperature in (0.6, 0.0):
        ask(endpoint, temperature=temperature, cache=VerdictCache(tmp_path / "v.jsonl"))
    assert len(endpoint.requests) == 2


def test_a_line_that_broke_off_is_passed_over_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    cache = VerdictCache(path)
    cache.put("a", True, task="t")
    cache.close()
    with open(path, "a") as file:
        file.write('{"key": "b", "answ')
    cache = VerdictCache(path)
    assert (cache.get("a"), cache.get("b")) == (True, None)
    cache.put("c", False)
    cache.close()
    cache = VerdictCache(path)
    assert (cache.get("a"), cache.get("c"), len(cache)) == (True, False, 2)


def test_a_file_with_junk_in_it_gives_booleans_only(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"key": "a", "answer": "yes"}\n[]\nnull\n{"key": 3, "answer": true}\n{"key": "b"}\n')
    assert len(VerdictCache(path)) == 0


def test_processes_write_their_own_files_and_read_each_others(tmp_path):
    mine, theirs = VerdictCache(tmp_path / "verdicts.jsonl"), VerdictCache(tmp_path / "verdicts-1.jsonl")
    mine.put("a", True)
    theirs.put("b", False)
    later = VerdictCache(tmp_path / "verdicts.jsonl")
    assert (later.get("a"), later.get("b")) == (True, False)


# In an episode.


def test_a_turn_without_a_verdict_is_not_valid_and_not_a_zero(serve):
    judge = RoutedJudge(LLMJudge([serve(status(500)).url], "m", tries=2, backoff_s=0.001))
    question = make_question()
    turn = judge_turn(question.task, 0, question.history, question.steps, judge, failed_before=False)
    judge.close()
    assert not turn.valid


def test_closing_lets_those_who_wait_go(serve):
    judge = LLMJudge([serve(slow(30, verdict())).url], "m")
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(judge.answer([make_question()])))
    waiting.start()
    time.sleep(0.3)
    judge.close()
    waiting.join(timeout=5)
    assert answers == [[None]] and judge.answer([make_question()]) == [None]
