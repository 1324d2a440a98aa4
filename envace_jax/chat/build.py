"""A small tokenizer with Qwen3's control tokens and a template of the same structure, as an ordinary HF directory.

For policies small enough to train from nothing: their vocabulary is a few hundred to a few thousand ids, and the
template's instructions cost tens of tokens where Qwen3's cost a hundred and fifty.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# Contractions, words with the character before them, single digits, punctuation with the line breaks after it, breaks,
# spaces: as Qwen's tokenizers split, so that a directory read under their class splits the same.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = r"""
{#- Turns, thinking, calls and results as Qwen3 writes them; the tools are introduced in fewer words. #}
{%- macro begin(role) %}{{ '<|im_start|>' ~ role ~ '\n' }}{% endmacro %}
{%- macro end() %}{{ '<|im_end|>\n' }}{% endmacro %}
{%- macro call(entry) %}
    {%- set entry = entry.function or entry %}
    {{- '<tool_call>\n{"name": "' ~ entry.name ~ '", "arguments": ' }}
    {{- entry.arguments if entry.arguments is string else entry.arguments | tojson }}
    {{- '}\n</tool_call>' }}
{%- endmacro %}
{%- macro text_of(message) %}{{ message.content if message.content is string else '' }}{% endmacro %}
{%- set first = messages[0] %}
{%- if tools %}
    {{- begin('system') }}
    {%- if first.role == 'system' %}{{ text_of(first) ~ '\n\n' }}{% endif %}
    {{- '# Tools\n<tools>\n' }}
    {%- for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}
    {{- '</tools>\nCall: <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>' ~ end() }}
{%- elif first.role == 'system' %}
    {{- begin('system') ~ text_of(first) ~ end() }}
{%- endif %}
{#- Thinking stays after the last message that a user wrote; a wrapped result is not such a message. #}
{%- set query = namespace(index=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and message.content is string %}
        {%- if not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
            {%- set query.index = loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text_of(message) %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- begin(message.role) ~ content ~ end() }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- begin('assistant') }}
        {%- if loop.index0 > query.index and (loop.last or thought) %}
            {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for entry in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\n' }}{% endif %}
            {{- call(entry) }}
        {%- endfor %}
        {{- end() }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ end() }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- begin('assistant') }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
""".strip()


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, directory: str | Path, *, pattern: str = WORD_PATTERN
) -> None:
    """Trains a byte-level BPE tokenizer and writes it with its template as a Hugging Face directory.

    Args:
        texts: what the policy will read and write, without control tokens.
        vocab_size: ids in all: 256 bytes, merges, and the control tokens, which come last as in Qwen3. Fewer come out
            where the texts do not hold so many merges.
        directory: receives tokenizer.json, tokenizer_config.json and generation_config.json (both end ids).
        pattern: regular expression of the pieces that merges never cross.

    Raises ValueError when the size has no room for bytes and control tokens.
    """
    control = len(SPECIAL_TOKENS) + len(TAG_TOKENS)
    smallest = 256 + control
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {control} control tokens need {smallest}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - control,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAG_TOKENS])

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
            "model_max_length": 32768,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    end, stop = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    _write_json(
        directory / "generation_config.json",
        {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "eos_token_id": [stop, end], "pad_token_id": end},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
