"""`envace data check` and `stats`: a bad record is rejected with its line, id and reason, and no value crashes them."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envace_jax import cli
from envace_jax.tasks import TaskError, parse_task
from envace_jax.tasks.inspection import check, stats
from envace_jax.tasks.synthetic import annotations, verl_row

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ITEM = {
    "id": "a",
    "question": "?",
    "focus_on": "assistant.tool_calls",
    "pass_condition": "p",
    "failure_examples": ["x"],
    "evidence": [{"turn": 0, "step": 0, "from": "assistant.tool_calls", "snippet": "f"}],
    "required_for_next_turn": False,
    "dependence": [],
    "weight": 1.0,
}
GOOD = {
    "uuid": "good",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u0"},
        {"role": "assistant", "content": "<think>t</think>", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "{}"},
        {"role": "assistant", "content": "a0"},
        {"role": "user", "content": "u1"},
        {"role": "assistant", "content": "a1"},
    ],
    "tools": [TOOL],
    "checklists": [[[ITEM], [{**ITEM, "id": "b", "weight": 0.5}, {**ITEM, "id": "c", "weight": 0.5}]]],
}


def changed(path, value):
    """The good record with one value changed; `...` takes it out."""
    record = copy.deepcopy(GOOD)
    *way, last = path
    inner = record
    for key in way:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return record


def nested(depth):
    value = {"type": "object"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"x": value}}
    return value


FIRST_ITEM = ("checklists", 0, 0, 0)
PARAMETERS = ("tools", 0, "function", "parameters")
ARGUMENTS = ("messages", 2, "tool_calls", 0, "function", "arguments")
REJECTED = [
    (("uuid",), ..., "uuid"),
    (("uuid",), " ", "uuid"),
    (("messages",), None, "messages"),
    (("messages",), "hello", "messages"),
    (("messages", 1), None, "message 1"),
    (("messages", 1, "role"), ["user"], "message 1 role"),
    (("messages", 1, "content"), [{"type": "text", "text": "u0"}], "message 1 text content list"),
    (("messages", 4, "content"), None, "message 4 text content NoneType"),
    (("messages", 3, "content"), {"a": 1}, "message 3 text content dict"),
    (("messages", 3, "tool_call_id"), "c9", "message 3 without call c9"),
    (("messages", 2, "tool_calls"), ..., "message 3 tool result without a call"),
    (("messages", 2, "tool_calls"), [], "message 3 tool result without a call"),
    (("messages", 2, "tool_calls"), "f()", "message 2 tool_calls list str"),
    (("messages", 2, "tool_calls", 0), "f()", "message 2 call 0 object str"),
    (("messages", 2, "tool_calls", 0, "function"), None, "message 2 call 0 function"),
    (("messages", 2, "tool_calls", 0, "function", "name"), " ", "message 2 call 0 name empty"),
    (ARGUMENTS, "{x: 1}", "message 2 call 0 arguments not JSON"),
    (ARGUMENTS, "", "message 2 call 0 arguments not JSON"),
    (ARGUMENTS, "[1]", "message 2 call 0 arguments object list"),
    (ARGUMENTS, '{"x": NaN}', "message 2 call 0 arguments NaN"),
    (ARGUMENTS, None, "message 2 call 0 arguments"),
    (ARGUMENTS, '{"x":' * 5000, "message 2 call 0 arguments nested"),
    (("messages", 4), {"role": "tool", "content": "again"}, "message 4 tool result without a call"),
    (("messages", 4), {"role": "system", "content": "s"}, "message 4 system first"),
    (("messages", 1), {"role": "user", "content": "u", "tool_calls": [CALL]}, "message 1 must not have tool_calls"),
    (("messages", 1, "content"), "\ud800", "Unicode surrogate"),
    (("tools",), None, "tools"),
    (("tools",), {"f": TOOL}, "tools dict"),
    (("tools", 0), None, "tool 0"),
    (("tools", 0), TOOL["function"], "tool 0 type"),
    (("tools", 0, "function"), "f", "tool 0 function"),
    (("tools", 0, "function", "name"), 3, "tool 0 name"),
    (PARAMETERS, [], "tool 0 (f) parameters list"),
    (PARAMETERS, {"type": "strin"}, "tool 0 (f) strin"),
    (PARAMETERS, {"type": "array"}, "tool 0 (f) object array"),
    (PARAMETERS, {"type": "object", "properties": {"x": {"type": "int"}}}, "tool 0 (f) schema int properties/x"),
    (PARAMETERS, {"type": "object", "properties": ["x"]}, "tool 0 (f) schema"),
    (PARAMETERS, {"type": "object", "required": "x"}, "tool 0 (f) schema required"),
    (PARAMETERS, {"type": "object", "properties": {"x": {"pattern": "("}}}, "tool 0 (f) regex"),
    (PARAMETERS, {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}}, "tool 0 (f) #/$defs/y nowhere"),
    (PARAMETERS, {"$schema": 3}, "tool 0 (f) schema"),
    (PARAMETERS, nested(200), "tool 0 (f) nested"),
    (("checklists",), None, "checklists"),
    (("checklists",), [None], "checklist"),
    (("checklists", 0), {"0": []}, "checklist list"),
    (("checklists", 0), [[ITEM]], "1 turns 2 user turns"),
    (("checklists", 0, 1), None, "turn 1 list"),
    (("checklists", 0, 1), [], "turn 1 sum to 0"),
    (("checklists", 0, 1, 0, "weight"), 0.4, "weights of turn 1 sum to 0.9"),
    (FIRST_ITEM, None, "turn 0 item 0"),
    ((*FIRST_ITEM, "weight"), None, "turn 0 item 0 lacks weight"),
    ((*FIRST_ITEM, "weight"), "1.0", "turn 0 item 0 weight"),
    ((*FIRST_ITEM, "weight"), True, "turn 0 item 0 weight"),
    ((*FIRST_ITEM, "weight"), -1, "turn 0 item 0 weight"),
    ((*FIRST_ITEM, "weight"), 10**400, "turn 0 item 0 weight"),
    ((*FIRST_ITEM, "weight"), float("nan"), "not JSON"),
    ((*FIRST_ITEM, "id"), [], "turn 0 item 0 id"),
    ((*FIRST_ITEM, "question"), 5, "turn 0 item 0 question"),
    ((*FIRST_ITEM, "focus_on"), "user.content", "turn 0 item 0 focus_on user.content"),
    ((*FIRST_ITEM, "focus_on"), None, "turn 0 item 0 lacks focus_on"),
    ((*FIRST_ITEM, "failure_examples"), "x", "turn 0 item 0 failure_examples"),
    ((*FIRST_ITEM, "failure_examples"), [1], "turn 0 item 0 failure_examples"),
    ((*FIRST_ITEM, "required_for_next_turn"), "false", "turn 0 item 0 required_for_next_turn"),
    ((*FIRST_ITEM, "dependence"), {"a": 1}, "turn 0 item 0 dependence"),
    ((*FIRST_ITEM, "evidence"), {}, "turn 0 item 0 evidence"),
    ((*FIRST_ITEM, "evidence", 0), "f", "turn 0 item 0 evidence 0"),
    ((*FIRST_ITEM, "evidence", 0, "turn"), 2, "turn 0 item 0 evidence 0 no turn 2 2 user turns"),
    ((*FIRST_ITEM, "evidence", 0, "turn"), -1, "evidence 0 no turn -1"),
    ((*FIRST_ITEM, "evidence", 0, "turn"), None, "evidence 0 turn"),
    ((*FIRST_ITEM, "evidence", 0, "turn"), "0", "evidence 0 turn"),
    ((*FIRST_ITEM, "evidence", 0, "step"), -1, "evidence 0 step"),
    ((*FIRST_ITEM, "evidence", 0, "snippet"), 7, "evidence 0 snippet"),
    ((*FIRST_ITEM, "rule"), "calls_made", "turn 0 item 0 rule"),
    (("meta",), [1], "meta"),
]


@pytest.fixture
def write(tmp_path):
    def write(*records, name="t.jsonl"):
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        return str(path)

    return write


@pytest.fixture
def envace(capsys):
    """Runs `envace data ARGS`; returns (exit status, stdout, stderr)."""

    def call(*args):
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", *map(str, args)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call


def test_the_good_record_is_accepted_and_nothing_in_it_is_lost():
    assert parse_task(GOOD).to_json() == GOOD


@pytest.mark.parametrize(
    ("path", "value", "words"), REJECTED, ids=lambda x: str(x)[:40].encode("ascii", "replace").decode()
)
def test_a_bad_value_is_a_rejection_that_names_it(path, value, words):
    with pytest.raises(TaskError) as caught:
        parse_task(changed(path, value))
    assert [word for word in words.split() if word not in caught.value.reason] == []
    assert caught.value.task_id == (None if path == ("uuid",) and value is ... else changed(path, value)["uuid"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("messages", 2, "content"), None),  # calls need no words
        (("messages", 2, "content"), ...),
        (("messages", 0), {"role": "user", "content": "before"}),
        (("messages", 3, "tool_call_id"), ...),
        (("messages", 2, "tool_calls", 0, "id"), None),
        (("messages", 4, "tool_calls"), None),
        (("messages", 4, "tool_calls"), []),
        (("messages", 1, "content"), ""),
        (("tools",), []),
        (PARAMETERS, ...),
        (PARAMETERS, {}),
        (PARAMETERS, {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}, "$defs": {"y": {}}}),
        ((*FIRST_ITEM, "evidence"), None),
        ((*FIRST_ITEM, "evidence"), ...),
        ((*FIRST_ITEM, "required_for_next_turn"), None),
        ((*FIRST_ITEM, "focus_on"), "assistant.content.thinking"),
        ((*FIRST_ITEM, "weight"), 1),
        (("extra",), {"any": "thing"}),
    ],
    ids=str,
)
def test_what_the_format_leaves_open_is_accepted(path, value):
    record = changed(path, value)
    record["checklists"][0] += [[ITEM]] if record["messages"][0]["role"] == "user" else []
    assert parse_task(record).id == "good"


def test_several_calls_are_answered_by_as_many_results_in_any_order():
    calls = [{**CALL, "id": name} for name in ("c1", "c2")]
    results = [{"role": "tool", "tool_call_id": name, "content": "{}"} for name in ("c2", "c1")]
    record = changed(("messages", 2, "tool_calls"), calls)
    record["messages"][3:4] = results
    assert len(parse_task(record).messages) == 8
    record["messages"].insert(5, results[0])
    with pytest.raises(TaskError, match="message 5 is a tool result without a call"):
        parse_task(record)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("extra_info",), None, "extra_info"),
        (("extra_info", "tools"), "[{]", "tools not JSON"),
        (("extra_info", "tools"), '{"a": 1}', "tools list"),
        (("extra_info", "messages"), None, "messages list"),
        (("extra_info", "interaction_kwargs"), None, "interaction_kwargs"),
        (("extra_info", "interaction_kwargs", "checklist_list"), None, "checklists list"),
        (("extra_info", "interaction_kwargs", "checklist_list"), [None], "checklist"),
        (("extra_info", "original_index"), [], "index"),
    ],
    ids=str,
)
def test_bad_values_of_the_verl_spelling(path, value, words):
    row = copy.deepcopy(verl_row(GOOD, 3))
    *way, last = path
    inner = row
    for key in way:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(TaskError) as caught:
        parse_task(row)
    assert [word for word in words.split() if word not in caught.value.reason] == []


def test_a_verl_row_without_an_original_index_is_named_by_its_index():
    row = verl_row(GOOD, 3)
    del row["extra_info"]["original_index"]
    assert parse_task(row).id == "3"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """The way to every value of a record."""
    yield from [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from places(child, (*path, key))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(places(GOOD))), JSON_VALUES)
def test_any_value_anywhere_is_accepted_or_rejected_and_nothing_else(path, value):
    try:
        task = parse_task(changed(path, value))
    except TaskError:
        return
    assert parse_task(json.loads(json.dumps(task.to_json()))) == task


@settings(max_examples=100, deadline=None)
@given(JSON_VALUES)
def test_any_value_at_all_is_accepted_or_rejected(value):
    with pytest.raises(TaskError):
        parse_task(value)


# The verbs.


def test_check_prints_one_object_with_every_rejected_record(write, envace):
    file = write(GOOD, "{broken", changed(("uuid",), "bad") | {"tools": None}, "", {**GOOD, "uuid": "good 2"}, "[1]")
    status, out, _ = envace("check", file, "--json")
    report = json.loads(out)
    assert status == 1
    assert (report["records"], report["accepted"]) == (5, 2)
    assert [(r["line"], r["id"]) for r in report["rejected"]] == [(2, None), (3, "bad"), (6, None)]
    assert all(set(r) == {"line", "id", "reason"} and r["reason"] for r in report["rejected"])
    assert "not JSON" in report["rejected"][0]["reason"] and "tools" in report["rejected"][1]["reason"]


def test_check_ends_with_status_0_when_all_is_well(write, envace):
    status, out, _ = envace("check", write(GOOD), "--json")
    assert (status, json.loads(out)) == (0, {"records": 1, "accepted": 1, "rejected": []})


def test_check_for_people_names_file_line_id_and_reason(write, envace):
    file = write(GOOD, changed(("messages", 1, "content"), None))
    status, out, _ = envace("check", file)
    assert status == 1
    assert f"{file}, line 2, task 'good': message 1 (user) must have text content" in out
    assert "2 records, 1 accepted, 1 rejected" in out


def test_a_file_that_cannot_be_opened_is_status_2(envace, tmp_path):
    status, out, err = envace("check", tmp_path / "absent.jsonl", "--json")
    assert (status, out) == (2, "") and "absent.jsonl: cannot be read" in err


def test_of_several_files_the_report_says_which(write, envace, tmp_path):
    write("{", name="a.jsonl"), write(GOOD, "[", name="b.jsonl")
    report = json.loads(envace("check", tmp_path / "*.jsonl", "--json")[1])
    assert report["records"] == 3
    assert [(r["file"].rpartition("/")[2], r["line"]) for r in report["rejected"]] == [("a.jsonl", 1), ("b.jsonl", 2)]


class Words:
    """A tokenizer whose tokens are words."""

    def render(self, messages, tools=None, add_generation_prompt=True, enable_thinking=True):
        assert isinstance(messages, list) and tools is not None
        return [word for m in messages for word in m["content"].split()]


def test_with_a_tokenizer_long_prompts_are_rejected(write):
    long = changed(("messages", 1, "content"), "word " * 50) | {"uuid": "long"}
    file = write(GOOD, long)
    assert check(file).accepted == 2
    assert check(file, chat=Words()).accepted == 2
    report = check(file, chat=Words(), max_prompt_tokens=51)
    assert report.accepted == 2  # 50 words and those of the system message
    (rejected,) = check(file, chat=Words(), max_prompt_tokens=50).rejected
    assert (rejected.line, rejected.id) == (2, "long")
    assert rejected.reason == "the first prompt has 51 tokens, more than 50"


def test_a_limit_without_a_tokenizer_is_refused(write, envace):
    status, _, err = envace("check", write(GOOD), "--max-prompt-tokens", 10)
    assert status == 2 and "--tokenizer" in err
    status, _, err = envace("check", write(GOOD), "--tokenizer", "nowhere")
    assert status == 2 and "nowhere" in err


def test_stats_count_what_is_accepted(write):
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    figures = stats(write(GOOD, {**GOOD, "tools": tools, "uuid": "other"}, GOOD, "{"), chat=Words())
    assert (figures["records"], figures["accepted"], figures["rejected"], figures["repeated_ids"]) == (4, 3, 1, 1)
    assert figures["user_turns"] == {"2": 3} and figures["messages"] == {"7": 3}
    assert figures["tools_per_task"] == {"1": 2, "2": 1}
    assert figures["tools"] == {"f": 3, "g": 1} and figures["distinct_tools"] == 2
    assert figures["items_per_turn"] == {"1": 3, "2": 3} and figures["items"] == 9
    by_bin = {b["from"]: b["count"] for b in figures["weights"]}
    assert by_bin[0.5] == 6 and by_bin[0.9] == 3 and sum(by_bin.values()) == 9
    assert figures["prompt_tokens"]["max"] == 2  # s, u0
    assert figures["conversation_tokens"]["min"] == 7
    assert sum(b["count"] for b in figures["conversation_tokens"]["histogram"]) == 3


def test_a_histogram_covers_every_length_once(write):
    lengths = [1, 2, 3, 50, 51, 99, 100, 240]
    records = [changed(("messages", 1, "content"), "w " * (n - 1)) | {"uuid": str(n)} for n in lengths]
    histogram = stats(write(*records), chat=Words())["prompt_tokens"]["histogram"]
    for b in histogram:
        assert b["count"] == sum(b["from"] <= n < b["to"] for n in lengths)
    assert sum(b["count"] for b in histogram) == len(lengths)


def test_stats_print_for_people_and_for_programs(write, envace):
    file = write(*annotations(3))
    status, out, _ = envace("stats", file, "--json")
    assert status == 0 and json.loads(out)["accepted"] == 3
    status, out, _ = envace("stats", file)
    assert status == 0 and "3 records, 3 accepted, 0 rejected" in out and "tools per task" in out


@pytest.mark.parametrize("verb", ["check", "stats", "build"])
def test_the_verbs_explain_themselves_with_an_example(envace, verb):
    status, out, _ = envace(verb, "--help")
    assert status == 0 and f"envace data {verb} " in out.partition("Example:")[2]
