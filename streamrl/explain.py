"""Every configuration key with its type, default and meaning, read from the structs themselves.

The meaning of a key is the string under its field. A key that all kinds of a union share is told once; the keys of a
list's items are written `list[].key`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types

from streamrl_queue.errors import ConfigError

from .settings import items, variants


class Key(NamedTuple):
    """One line of the explanation. `kind` says for which kind of its parent the key exists."""

    path: str
    type: str
    default: str
    meaning: str
    kind: str = ""


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a class and its bases, in one line each."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base in (object, msgspec.Struct) or not issubclass(base, msgspec.Struct):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                docs[field.target.id] = " ".join(text.value.value.split())
    return docs


def keys(kind: type[msgspec.Struct]) -> Iterator[Key]:
    """Every key of `kind`, depth first, all kinds of its unions included."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    yield from _keys(info, "", "")


def _keys(info: types.StructType, prefix: str, kind: str) -> Iterator[Key]:
    docs = field_docs(info.cls)
    for field in info.fields:
        path = f"{prefix}{field.name}"
        structs = variants(field.type)
        tag_field = structs[0].tag_field if structs else None
        meaning = docs.get(field.name, "")
        if tag_field:
            tags = " | ".join(str(s.tag) for s in structs)
            default = _default(field, structs)
            yield Key(f"{path}.{tag_field}", tags, default, meaning or _summary(structs[0].cls), kind)
        elif not structs:
            yield Key(path, _name(field.type), _default(field, ()), meaning, kind)
        yield from _below(structs, f"{path}.", kind)
        yield from _below(items(field.type), f"{path}[].", kind)


def _below(structs: Sequence[types.StructType], prefix: str, kind: str) -> Iterator[Key]:
    """The keys of all `structs`, each once: `kind` says for which of them, when it is not for all."""
    found: dict[Key, list[str]] = {}
    for struct in structs:
        for key in _keys(struct, prefix, ""):
            found.setdefault(key, []).append(str(struct.tag))
    for key, tags in found.items():
        when = kind if len(tags) == len(structs) else f"{structs[0].tag_field}: {' | '.join(tags)}"
        yield key._replace(kind=key.kind or when)


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _default(field: types.Field, structs: tuple[types.StructType, ...]) -> str:
    value: Any = field.default
    if value is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    for struct in structs:
        if type(value) is struct.cls:
            return str(struct.tag)
    return _text(msgspec.to_builtins(value))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value)


_SIMPLE = {
    types.IntType: "int",
    types.FloatType: "float",
    types.StrType: "str",
    types.BoolType: "bool",
    types.NoneType: "null",
    types.AnyType: "any",
}


def _name(info: types.Type) -> str:
    if isinstance(info, types.UnionType):
        return " | ".join(_name(part) for part in info.types)
    if isinstance(info, types.LiteralType):
        return " | ".join(str(value) for value in info.values)
    if isinstance(info, types.ListType | types.VarTupleType):
        return f"list of {_name(info.item_type)}"
    if isinstance(info, types.TupleType):
        return f"[{', '.join(_name(part) for part in info.item_types)}]"
    if isinstance(info, types.DictType):
        return f"{_name(info.key_type)} to {_name(info.value_type)}"
    if isinstance(info, types.StructType):
        return f"{{{info.tag_field}: {info.tag}}}" if info.tag_field else "keys and values"
    return _SIMPLE.get(type(info), type(info).__name__.removesuffix("Type").lower())


def explanation(
    kind: type[msgspec.Struct], below: str = "", *, values: Mapping[str, Any] | None = None, source: str = "here"
) -> str:
    """Keys as text: one line `key: type (default)`, the meaning indented under it.

    Args:
        kind: the struct whose keys they are.
        below: only this dotted key and those below it; all when it is empty.
        values: a configuration as nested mappings; a value that is not the default is told, as the one in `source`.
        source: the name of that configuration.

    Raises:
        ConfigError: there is no such key; names the nearest.
    """
    lines = []
    for key in _only(list(keys(kind)), below):
        when = f"  [{key.kind}]" if key.kind else ""
        default = "required" if key.default == "required" else f"default {key.default}"
        given = _text(_at(values or {}, key, key.default))
        told = f"{default}, {source}: {given}" if given != key.default else default
        lines.append(f"{key.path}: {key.type} ({told}){when}")
        if key.meaning:
            lines.append(textwrap.fill(key.meaning, 100, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def _only(found: list[Key], below: str) -> list[Key]:
    chosen = [key for key in found if not below or key.path == below or key.path.startswith((f"{below}.", f"{below}["))]
    if not chosen:
        paths = [key.path for key in found]
        leaves = {path.rpartition(".")[2]: path for path in paths}
        near = [
            *difflib.get_close_matches(below, paths, 1),
            *(leaves[n] for n in difflib.get_close_matches(below, leaves, 1)),
        ]
        hint = f"; did you mean {near[0]}?" if near else "; without a key, all of them are explained"
        raise ConfigError(f"--explain: there is no key {below}{hint}")
    return chosen


def _at(values: Any, key: Key, otherwise: Any) -> Any:
    """The value of a key; `otherwise` where these values have no such key, or it is one of another kind."""
    tag_field, _, tags = key.kind.partition(": ")
    chosen = not tags
    for part in key.path.split("."):
        if not (isinstance(values, Mapping) and part in values):
            return otherwise
        chosen |= values.get(tag_field) in tags.split(" | ")
        values = values[part]
    return values if chosen else otherwise
