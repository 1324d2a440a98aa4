"""From YAML and `key=value` to a checked, frozen configuration, and back.

OmegaConf reads, merges and interpolates; the conversion to dataclasses is ours, because its errors must name the key,
the place it came from, what was expected and the nearest valid key.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from envace_jax.config.schema import Config
from envace_jax.errors import ConfigError

T = TypeVar("T")

# What a resumed run may change: how far and where it runs and what is looked at, never what is being optimised.
# `output_dir` is where the run was found, so a moved run directory resumes too, and so do moved checkpoints.
MAY_CHANGE = ("output_dir", "train.steps", "train.checkpoints", "evaluation", "logging", "mesh", "faults")


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[T] = Config) -> T:
    """Reads a YAML file, applies `key=value` overrides in order, and returns the checked `schema`.

    A file may be an overlay: its `base: other.yaml`, relative to it, is read first, and its own keys count over those.

    Raises:
        ConfigError: the file cannot be read, or a key, type, choice or combination is wrong; the message names it.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {override!r}: expected key=value, for example train.steps=100")
    try:
        from_file = _load_file(path)
        from_overrides = OmegaConf.from_dotlist(list(overrides))
        merged = OmegaConf.merge(from_file, from_overrides)
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error

    overridden = set(flatten(OmegaConf.to_container(from_overrides)))

    def place(key: str) -> str:
        return "command line" if any(k == key or k.startswith(key + ".") for k in overridden) else str(path)

    return from_dict(schema, values, place=place)


def _load_file(path: Path, above: tuple[Path, ...] = ()) -> typing.Any:
    """The keys of a file over those of its `base`."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: is its own base; let `base` name another file")
    if above and not path.is_file():
        raise ConfigError(f"{above[-1]}: base: no such configuration file: {path}")
    values = OmegaConf.load(path)
    if not OmegaConf.is_dict(values):
        raise ConfigError(f"{path}: expected a mapping of keys at the top level")
    if "base" not in values:
        return values
    base = values.pop("base")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r}: expected the name of a file")
    return OmegaConf.merge(_load_file(path.parent / base, (*above, path.resolve())), values)


def from_dict(schema: type[T], values: Mapping[str, Any], place: typing.Callable[[str], str] | str = "config") -> T:
    """Builds the dataclass `schema` from nested mappings, checking every key and value.

    `place` says where a dotted key came from, for the error messages.
    """
    where = place if callable(place) else lambda key: place
    return _build(schema, values, "", schema, where)


def save_config(config: object, path: str | Path) -> None:
    """Writes the resolved configuration as YAML; `load_config` reads it back to an equal one."""
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))), encoding="utf-8")


def to_dict(config: object) -> dict[str, Any]:
    """The configuration as plain nested dictionaries, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def diff_on_resume(old: object, new: object) -> list[str]:
    """Names the keys, dotted and sorted, that differ between two configurations and may not change on resume.

    Each side is a configuration or its plain dictionary. A key that only one side has counts as different.
    """
    absent = object()
    before, after = (flatten(side if isinstance(side, Mapping) else to_dict(side)) for side in (old, new))
    return sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key, absent) != after.get(key, absent)
        and not any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@cache
def _hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema)


@cache
def _all_keys(schema: type, prefix: str = "") -> tuple[str, ...]:
    keys = []
    for name, hint in _hints(schema).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            keys.extend(_all_keys(hint, f"{prefix}{name}."))
    return tuple(keys)


def _nearest(key: str, root: type) -> str:
    """The valid key most like `key`: same name in another section first, then by spelling."""
    keys = _all_keys(root)
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    leaf = key.rpartition(".")[2]
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    if not close and not same_leaf:
        leaves = {k.rpartition(".")[2]: k for k in reversed(keys)}
        close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    close = same_leaf[:1] or close or difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
    return close[0]


def _build(schema: type, values: Any, prefix: str, root: type, where: typing.Callable[[str], str]) -> Any:
    section = prefix.rstrip(".")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where(section)}: {section}={values!r}: expected a section with keys")
    hints = _hints(schema)
    for key in values:
        if key not in hints:
            dotted = f"{prefix}{key}"
            raise ConfigError(f"{where(dotted)}: unknown key {dotted!r}; did you mean {_nearest(dotted, root)!r}?")
    for field in dataclasses.fields(schema):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in values:
            raise ConfigError(f"{where(section)}: missing key {prefix + field.name!r}, which has no default")
    made = {}
    for key, value in values.items():
        dotted, hint = f"{prefix}{key}", hints[key]
        if dataclasses.is_dataclass(hint):
            made[key] = _build(hint, value, f"{dotted}.", root, where)
        else:
            made[key] = _convert(hint, value, dotted, where)
    try:
        return schema(**made)
    except ConfigError as error:
        raise ConfigError(f"{where(section)}: {error}") from error
    except (ValueError, TypeError) as error:  # a section's own check, such as GRPOConfig's
        raise ConfigError(f"{where(section)}: {section}: {error}") from error


def _convert(hint: Any, value: Any, key: str, where: typing.Callable[[str], str]) -> Any:
    converted = _try(hint, value)
    if converted is _NO:
        what = _describe(hint)
        hint_text = ""
        if typing.get_origin(hint) is Literal and isinstance(value, str):
            close = difflib.get_close_matches(value, [str(a) for a in typing.get_args(hint)], n=1)
            hint_text = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{where(key)}: {key}={value!r}: expected {what}, found {_kind(value)}{hint_text}")
    return converted


_NO = object()


def _try(hint: Any, value: Any) -> Any:
    """`value` as `hint`, or `_NO`. An integer passes as a float; nothing else changes its type silently."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return next((made for made in (_try(arg, value) for arg in args) if made is not _NO), _NO)
    if origin is Literal:
        return next((a for a in args if a == value and type(a) is type(value)), _NO)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return _NO
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        items = [_try(kind, item) for kind, item in zip(kinds, value, strict=False)]
        return _NO if len(kinds) != len(value) or any(item is _NO for item in items) else tuple(items)
    if origin is dict or hint is dict:
        return dict(value) if isinstance(value, Mapping) else _NO
    if hint is type(None) or hint is None:
        return None if value is None else _NO
    if hint is float:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _NO
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    return value if isinstance(value, hint) else _NO


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return f"a list ({_describe(args[0])})"
    if origin is tuple:
        return f"a list of {len(args)} values ({', '.join(_describe(a) for a in args)})"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}
    return names.get(hint, "a mapping" if (origin or hint) is dict else str(hint))


def _kind(value: Any) -> str:
    names = {bool: "true/false", int: "an integer", float: "a number", str: "text", type(None): "null"}
    return names.get(type(value), "a section" if isinstance(value, Mapping) else "a list")
