"""The small tokenizer: Qwen3's control tokens and turn structure, as a directory that Hugging Face reads alike."""

import json

import pytest
from transformers import AutoTokenizer

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer


def test_structure_is_that_of_the_real_template(small, shared_dir):
    cases = json.loads((shared_dir / "golden" / "qwen3_chat.json").read_text(encoding="utf-8"))["cases"]
    compared = 0
    for case in cases:
        if not case["kwargs"].get("tools"):  # only the words that introduce tools are our own
            ids = small.render(case["messages"], **{"add_generation_prompt": False, **case["kwargs"]})
            assert small.decode(ids) == case["text"], case["name"]
            compared += 1
    assert compared >= 15


def test_a_conversation_in_full(small):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": "<b>"}}}]
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nx"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [call, call]},
        {"role": "tool", "content": "A"},
        {"role": "tool", "content": "B"},
        {"role": "assistant", "content": "done"},
    ]
    text = small.decode(small.render(messages, tools, add_generation_prompt=False))
    head, _, rest = text.partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '\n{"type": "function", "function": {"name": "f", "parameters": {"é": "<b>"}}}\n</tools>' in head
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert rest == (
        "<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nnew\n</think>\n\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\ndone<|im_end|>\n"
    )


def test_ids_are_bytes_then_merges_then_control_tokens(small):
    assert small.vocab_size <= 320
    assert sorted(vars(small.control).values()) == list(range(small.vocab_size - 9, small.vocab_size))
    for text in ("order", " status", "\x00\n", "中🚄"):  # every text has ids, known words few of them
        assert small.decode(small.encode_text(text)) == text
    assert len(small.encode_text(" order")) < len(" order")


def test_digits_are_single_tokens(small):
    assert len(small.encode_text("144144")) == 6


def test_generation_stops_at_both_end_ids(small, small_directory):
    config = json.loads((small_directory / "generation_config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == list(small.stop_ids)
    assert config["pad_token_id"] == small.control.endoftext


@pytest.mark.parametrize("with_model_config", [False, True])
def test_hugging_face_reads_the_directory_alike(small, tmp_path, with_model_config):
    small.save(tmp_path)
    if with_model_config:  # as an exported policy has it; it must not bring in another tokenizer class
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    other = AutoTokenizer.from_pretrained(tmp_path)
    text = "It's 144 orders...\n\n  They'll ship  {\"a\": [1]}\r\n中é e\u0301"
    assert other(text, add_special_tokens=False)["input_ids"] == small.encode_text(text).tolist()
    assert (other.eos_token_id, other.pad_token_id) == (small.control.im_end, small.control.endoftext)
    messages = [{"role": "user", "content": text}]
    assert other.apply_chat_template(messages, return_dict=False) == small.render(messages, None, False).tolist()


def test_a_size_without_room_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size 264 is too small.*265"):
        train_tokenizer(["text"], 264, tmp_path)
    train_tokenizer(["text"], 265, tmp_path)
    assert ChatTokenizer.from_pretrained(tmp_path).vocab_size == 265
