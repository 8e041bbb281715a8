"""YAML and dotted overrides into typed structs, with errors that say what to write instead.

Knows nothing about streamrl's own keys: `config.py` has those. A *tagged union* is a key whose options depend
on its kind (`algorithm: {loss: ppo_clip, clip: 0.2}`); its kind alone may be written as a plain string.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import yaml
from msgspec import inspect as types

from streamrl_queue.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

# Beyond it a whole number does not fit the journal, torch or numpy.
MOST: Final = 1 << 63


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: `2e-3` is a number, and a key that appears twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"key {key!r} appears twice (line {line}); keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML follows, reads 2e-3 as a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    """The value that `text` stands for. `where` names the file or option in the error.

    Raises:
        ConfigError: when the text is no YAML, or has a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set `key.sub=value` in `data`; the value is read as YAML.

    Raises:
        ConfigError: when it is not of that form, or passes through something that has no keys.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"override {override!r}: expected key.sub=value, for example learner.steps=20")
    set_value(data, key.strip(), parse_yaml(text, f"override {override!r}"), f"override {override!r}")


def set_value(data: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set the dotted `key` in `data`. `where` names the option in the error.

    Raises:
        ConfigError: when the key passes through something that has no keys.
    """
    parts = key.split(".")
    here = data
    for depth, part in enumerate(parts[:-1]):
        below = here.setdefault(part, {})
        if not isinstance(below, dict):
            path = ".".join(parts[: depth + 1])
            raise ConfigError(
                f"{where}: {path} is {below!r} and has no key {parts[depth + 1]}; "
                f"write {path}={{...}} with all its keys"
            )
        here = below
    here[parts[-1]] = value


def build(kind: type[T], data: Mapping[str, Any]) -> T:
    """`data` as a `kind`, every key checked.

    Raises:
        ConfigError: unknown key (with the nearest name), an option of another kind, or a value of a wrong type.
    """
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    checked = _checked(info, data, "", tuple(known_paths(info)))
    try:
        return msgspec.convert(checked, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        key = path.strip("`").removeprefix("$").removeprefix(".")
        raise ConfigError(f"{key or 'configuration'}: {message[:1].lower()}{message[1:]}") from None


def variants(info: types.Type) -> tuple[types.StructType, ...]:
    """The structs that a value of this type may be: one, several for a tagged union, none for a plain value."""
    if isinstance(info, types.StructType):
        return (info,)
    if isinstance(info, types.UnionType):
        return tuple(t for t in info.types if isinstance(t, types.StructType))
    return ()


def items(info: types.Type) -> tuple[types.StructType, ...]:
    """The structs that an item of this list type may be; none for anything else."""
    return variants(info.item_type) if isinstance(info, types.ListType | types.VarTupleType) else ()


def known_paths(info: types.StructType, prefix: str = "") -> Iterator[str]:
    """Every dotted key below `info`, of all kinds."""
    for field in info.fields:
        path = f"{prefix}{field.name}"
        yield path
        for structs, below in ((variants(field.type), f"{path}."), (items(field.type), f"{path}[].")):
            for struct in structs:
                if struct.tag_field:
                    yield f"{below}{struct.tag_field}"
                yield from known_paths(struct, below)


def _checked(info: types.StructType, data: Any, path: str, known: Sequence[str]) -> dict[str, Any]:
    """`data` with the kinds of unions filled in; raises on keys that `info` does not have."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'configuration'}: expected keys and values, got {data!r}")
    fields = {field.name: field for field in info.fields}
    out: dict[str, Any] = {}
    for key, value in data.items():
        below = f"{path}.{key}" if path else str(key)
        if key == info.tag_field:
            out[key] = value
        elif key in fields:
            out[key] = _value(fields[key], value, below, known)
        else:
            raise ConfigError(_unknown(info, below, str(key), known))
    return out


def _value(field: types.Field, value: Any, path: str, known: Sequence[str]) -> Any:
    if isinstance(field.type, types.ListType | types.VarTupleType) and isinstance(value, list):
        item = types.Field(name=field.name, encode_name=field.name, type=field.type.item_type)
        return [_value(item, one, f"{path}[{i}]", known) for i, one in enumerate(value)]
    structs = variants(field.type)
    if not structs or (value is None and _nullable(field.type)):
        _check_plain(field.type, value, path)
        return value
    struct, given = _choose(field, structs, value, path)
    return _checked(struct, given, path, known)


def _check_plain(info: types.Type, value: Any, path: str) -> None:
    """No number is NaN, infinite or beyond 64 bits, at any depth; a word is one of those that are known."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: expected a finite number, got {value}")
    if isinstance(value, int) and not -MOST < value < MOST:
        raise ConfigError(f"{path}: expected a number of at most 64 bits, got {value}")
    if isinstance(info, types.LiteralType) and value not in info.values:
        words = ", ".join(str(word) for word in info.values)
        raise ConfigError(f"{path}: expected one of {words}; got {value!r}{_did_you_mean(str(value), info.values)}")
    if isinstance(value, Mapping):
        for key, one in value.items():
            _check_plain(types.AnyType(), one, f"{path}.{key}")
    elif isinstance(value, list):
        for i, one in enumerate(value):
            _check_plain(types.AnyType(), one, f"{path}[{i}]")


def _nullable(info: types.Type) -> bool:
    return isinstance(info, types.UnionType) and any(isinstance(t, types.NoneType) for t in info.types)


def _choose(
    field: types.Field, structs: tuple[types.StructType, ...], value: Any, path: str
) -> tuple[types.StructType, Any]:
    """Which struct `value` means: by its tag, by a plain string, or by the field's default."""
    tag_field = structs[0].tag_field
    if tag_field is None:
        return structs[0], value
    by_tag = {struct.tag: struct for struct in structs}
    if isinstance(value, str):
        value = {tag_field: value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected keys and values, got {value!r}")
    tag = value.get(tag_field, _default_tag(field, structs))
    if tag not in by_tag:
        names = ", ".join(str(name) for name in by_tag)
        got = "nothing" if tag is None else repr(tag)
        raise ConfigError(f"{path}.{tag_field}: expected one of {names}; got {got}{_did_you_mean(str(tag), by_tag)}")
    return by_tag[tag], {tag_field: tag, **value}


def _default_tag(field: types.Field, structs: tuple[types.StructType, ...]) -> Any:
    if len(structs) == 1:
        return structs[0].tag
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return next((s.tag for s in structs if type(default) is s.cls), None)


def _unknown(info: types.StructType, path: str, key: str, known: Sequence[str]) -> str:
    own = [field.name for field in info.fields]
    if info.tag_field and re.sub(r"\[\d+\]", "[]", path) in known:
        parent = path.rpartition(".")[0]
        needed = [f"{field.name}: …" for field in info.fields if field.required]
        whole = f"{parent}={{{', '.join([f'{info.tag_field}: {info.tag}', *needed])}}}"
        # An item of a list has no override of its own.
        advice = "" if parent.endswith("]") else f"; where a file sets it, write {whole} to replace the whole block"
        return (
            f"{path}: {info.tag_field}: {info.tag} has no key {key} and would ignore it; its keys are "
            f"{', '.join(own) or 'none'}; leave {key} out{advice}"
        )
    near = difflib.get_close_matches(key, own, n=1, cutoff=0.6)
    prefix = path[: len(path) - len(key)]
    if near:
        return f"unknown key {path}; did you mean {prefix}{near[0]}?"
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key {path}; did you mean {elsewhere[0]}?"
    leaves = {name.rpartition(".")[2]: name for name in known}
    far = difflib.get_close_matches(key, leaves, n=1, cutoff=0.75)
    if far:
        return f"unknown key {path}; did you mean {leaves[far[0]]}?"
    return f"unknown key {path}; the keys here are {', '.join(own)}"


def _did_you_mean(name: str, among: Iterable[Any]) -> str:
    near = difflib.get_close_matches(name, [str(key) for key in among], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys in which two nested mappings differ, with both values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from differences(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif a != b:
        yield path, a, b


def plain(struct: msgspec.Struct) -> dict[str, Any]:
    """The struct as mappings, lists, strings and numbers, its kinds included."""
    return msgspec.to_builtins(struct, str_keys=True)  # type: ignore[no-any-return]


def to_yaml(struct: msgspec.Struct) -> str:
    """The struct as YAML that `build` reads back as an equal one."""
    return yaml.safe_dump(plain(struct), sort_keys=False, default_flow_style=None, width=100)
