"""Messages to ids and back: Qwen3's chat format, token in and token out; parsers of calls and rehearsed responses."""

from envace_jax.chat.parsing import (
    ParseError,
    Rehearsal,
    ToolCall,
    Turn,
    is_error_tool_call,
    parse_rehearsal,
    parse_tool_calls,
)
from envace_jax.chat.tokenizer import ChatTokenizer, ControlIds

__all__ = [
    "ChatTokenizer",
    "ControlIds",
    "ParseError",
    "Rehearsal",
    "ToolCall",
    "Turn",
    "is_error_tool_call",
    "parse_rehearsal",
    "parse_tool_calls",
]
