"""Messages to ids and sampled ids to turns, token in, token out.

What Hugging Face's `apply_chat_template` gives is what `ChatTokenizer.render` gives, with one difference: results of
tools are data. A result that spells `<|im_end|>` or `<tool_call>` would otherwise end the turn or make a call in the
actor's name; here it becomes the ordinary tokens of that spelling.

How: before the template runs, the first character of every control literal in a result is replaced by a private-use
character that occurs nowhere in the conversation. So the template still trims, tests and places the text as it likes,
and the tokenizer finds only the control literals that the template or another role wrote. The stretches between them
get their characters back and are encoded by a copy of the tokenizer that knows no control token.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer, models

from envace_jax.chat import parsing
from envace_jax.chat.parsing import ParseError, Tag, Turn, read_turn
from envace_jax.chat.strict_json import well_formed

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
_ANCHOR = "\ue000"  # stands for the sampled turn when the text after it is wanted


@dataclass(frozen=True)
class ControlIds:
    """Ids of the tokens that steer an episode."""

    think_open: int
    think_close: int
    im_start: int
    im_end: int
    endoftext: int
    call_open: int
    call_close: int
    response_open: int
    response_close: int


CONTROL_LITERALS = {
    "think_open": parsing.THINK_OPEN,
    "think_close": parsing.THINK_CLOSE,
    "im_start": "<|im_start|>",
    "im_end": parsing.TURN_END,
    "endoftext": "<|endoftext|>",
    "call_open": parsing.CALL_OPEN,
    "call_close": parsing.CALL_CLOSE,
    "response_open": parsing.RESPONSE_OPEN,
    "response_close": parsing.RESPONSE_CLOSE,
}
_EMPTY_THOUGHT = f"{parsing.THINK_OPEN}\n\n{parsing.THINK_CLOSE}\n\n"


class ChatTokenizer:
    """A tokenizer with its chat template. Ids are int32 arrays [T]."""

    def __init__(self, tokenizer: Tokenizer, template: str, variables: Mapping[str, str], directory: Path):
        self._full = tokenizer
        self._added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
        self._plain = _without_added_tokens(tokenizer)
        self._template = _compile(template)
        self._template_characters = frozenset(template)
        self._variables = dict(variables)
        self._directory = directory
        missing = [text for text in CONTROL_LITERALS.values() if text not in self._added]
        if missing:
            raise ValueError(f"{directory}/tokenizer.json lacks control tokens: {', '.join(missing)}")
        self.control = ControlIds(**{name: self._added[text] for name, text in CONTROL_LITERALS.items()})
        self.stop_ids = (self.control.im_end, self.control.endoftext)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._added_ids = frozenset(self._added.values())
        # Every position where a literal starts, also one inside another's match.
        longest_first = sorted((text for text in self._added if text), key=len, reverse=True)
        self._literal_start = re.compile(f"(?=(?:{'|'.join(map(re.escape, longest_first))}))(.)", re.DOTALL)
        self._tag_names = self._literals_by_id("think_open", "think_close", "call_open", "call_close")
        self._forbidden = self._literals_by_id("im_start", "endoftext", "response_open", "response_close")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> "ChatTokenizer":
        """Loads an ordinary Hugging Face directory: tokenizer.json, tokenizer_config.json, and the chat template in
        chat_template.jinja or in tokenizer_config.json. Raises FileNotFoundError or ValueError naming what is missing.
        """
        directory = Path(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (directory / name).is_file():
                raise FileNotFoundError(f"{directory / name} does not exist; a model directory holds its tokenizer")
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = _read_template(directory, config)
        variables = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        return cls(Tokenizer.from_file(str(directory / "tokenizer.json")), template, variables, directory)

    def save(self, directory: str | Path) -> None:
        """Copies the tokenizer's files, byte by byte, so that an export is read as the original was."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            source = self._directory / name
            if source.is_file() and source.resolve() != (directory / name).resolve():
                shutil.copyfile(source, directory / name)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
        *,
        data_roles: Collection[str] = ("tool",),
    ) -> np.ndarray:
        """Ids of a conversation, int32 [T]: Hugging Face's, but with the text of role `tool` as data.

        Args:
            messages: dicts as in the OpenAI chat format; `content` may be None, arguments may be a string or a dict.
            tools: OpenAI function schemas.
            add_generation_prompt: end with the opening of an assistant turn.
            enable_thinking: False closes thinking in that opening with an empty block.
            data_roles: roles whose text yields no control id; a prompt that quotes a conversation adds `user`.

        Raises ValueError without messages.
        """
        if not messages:
            raise ValueError("there are no messages to render; a conversation holds at least one")
        return self._encode(*self._render_text(messages, tools, add_generation_prompt, enable_thinking, data_roles))

    def tool_results(self, contents: Sequence[str], enable_thinking: bool = True) -> np.ndarray:
        """What to append after a sampled `<|im_end|>`: these results as data, and the next generation prompt.

        Raises TypeError for a result that is not text: how JSON is spelled is decided where it is made.
        """
        for index, content in enumerate(contents):
            if not isinstance(content, str):
                raise TypeError(f"tool result {index} is {type(content).__name__}, not str; json.dumps it first")
        return self._continuation([{"role": "tool", "content": content} for content in contents], enable_thinking)

    def user(self, content: str, enable_thinking: bool = True) -> np.ndarray:
        """What to append after a sampled `<|im_end|>`: a user message and the next generation prompt."""
        return self._continuation([{"role": "user", "content": content}], enable_thinking)

    def response_header(self, first: bool) -> np.ndarray:
        """What opens a rehearsed response in the actor's own stream: after `<|im_end|>`, or after another response."""
        turn = "\n<|im_start|>user" if first else ""
        return self._encode(f"{turn}\n{parsing.RESPONSE_OPEN}\n")

    def responses_done(self, enable_thinking: bool = True) -> np.ndarray:
        """What follows the last rehearsed response of a turn, up to and with the next generation prompt."""
        return self._encode("<|im_end|>\n<|im_start|>assistant\n" + ("" if enable_thinking else _EMPTY_THOUGHT))

    def encode_text(self, text: str) -> np.ndarray:
        """Ids of a text as data, int32 [T]: no control id, whatever the text spells."""
        return _as_array(self._plain.encode(well_formed(text), add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens spelled out. Bytes that are not UTF-8 become U+FFFD."""
        return self._full.decode(_as_list(ids), skip_special_tokens=False)

    def parse_turn(self, ids: Iterable[int]) -> Turn:
        """Reads a sampled turn of the actor as `parse_tool_calls` does, but from control ids.

        The turn ends at its first `<|im_end|>`, or where the ids end. A tag that is spelled with ordinary tokens is
        text. `<|endoftext|>`, `<|im_start|>` and response tags have no place in a turn: UNEXPECTED_CONTROL.
        """
        text = ""
        tags: list[Tag] = []
        pending: list[int] = []
        unexpected = None
        for token in _as_list(ids):
            if token == self.control.im_end:
                break
            if token in self._forbidden:
                place = f"{self._forbidden[token]} inside a turn of the assistant"
                unexpected = ParseError("UNEXPECTED_CONTROL", f"{place}; a turn ends with {parsing.TURN_END}")
                break
            if token not in self._tag_names:
                pending.append(token)
                continue
            name = self._tag_names[token]
            text += self.decode(pending)
            pending.clear()
            tags.append(Tag(len(text), len(text) + len(name), name))
            text += name
        turn = read_turn(text + self.decode(pending), tags)
        return replace(turn, calls=(), error=unexpected) if unexpected else turn

    def _literals_by_id(self, *names: str) -> dict[int, str]:
        return {getattr(self.control, name): CONTROL_LITERALS[name] for name in names}

    def _continuation(self, messages: list[dict[str, Any]], enable_thinking: bool) -> np.ndarray:
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANCHOR}]
        text, mask = self._render_text([*before, *messages], None, True, enable_thinking, ("tool",))
        _, _, after = text.partition(_ANCHOR)
        _, _, after = after.partition(parsing.TURN_END)
        return self._encode(after, mask)

    def _render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        enable_thinking: bool,
        data_roles: Collection[str],
    ) -> tuple[str, dict[str, str]]:
        """The rendered text with the control literals of data masked, and the mask."""
        mask = self._mask(messages, tools, data_roles)
        if mask:
            messages = [
                {key: value if key == "role" else self._masked(value, mask) for key, value in message.items()}
                if message.get("role") in data_roles
                else message
                for message in messages
            ]
        text = self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            **self._variables,
        )
        return text, mask

    def _mask(self, messages: Sequence[Mapping[str, Any]], tools: Any, data_roles: Collection[str]) -> dict[str, str]:
        """First characters of the control literals in data → private-use characters that occur nowhere in the chat."""
        first_characters = {
            match.group(1)
            for message in messages
            if message.get("role") in data_roles
            for text in _strings(message)
            for match in self._literal_start.finditer(text)
        }
        if not first_characters:
            return {}
        used = self._template_characters.union(*_strings([messages, tools]))
        free = (chr(point) for point in _PRIVATE_USE if chr(point) not in used)
        return dict(zip(sorted(first_characters), free, strict=False))

    def _masked(self, value: Any, mask: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            return self._literal_start.sub(lambda match: mask[match.group(1)], value)
        if isinstance(value, Mapping):
            return {key: self._masked(item, mask) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._masked(item, mask) for item in value]
        return value

    def _encode(self, text: str, mask: Mapping[str, str] | None = None) -> np.ndarray:
        text = well_formed(text)
        encoding = self._full.encode(text, add_special_tokens=False)
        if not mask:
            return _as_array(encoding.ids)
        restore = str.maketrans({stand_in: character for character, stand_in in mask.items()})
        ids: list[int] = []
        position = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._added_ids:
                ids.extend(self.encode_text(text[position:start].translate(restore)))
                ids.append(token)
                position = end
        ids.extend(self.encode_text(text[position:].translate(restore)))
        return _as_array(ids)


def _read_template(directory: Path, config: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{directory} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json"
        )
    return template


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer for data: no text becomes an added token."""
    model = tokenizer.model
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if any(model.token_to_id(text) is not None for text in added):  # trained in: merges could still lead to them
        state = json.loads(tokenizer.to_str())["model"]
        vocab = {text: index for text, index in state["vocab"].items() if text not in added}
        pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in state["merges"]]
        merges = [pair for pair in pairs if added.isdisjoint((*pair, "".join(pair)))]
        model = models.BPE(vocab=vocab, merges=merges)
    plain = Tokenizer(model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain


def _compile(template: str) -> jinja2.Template:
    """The template in the environment that Hugging Face's templates are written for."""

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _as_list(ids: Iterable[int]) -> list[int]:
    array = ids if isinstance(ids, (list, tuple)) or hasattr(ids, "__array__") else list(ids)
    return np.asarray(array, dtype=np.int64).tolist()


def _as_array(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
