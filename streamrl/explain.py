"""Every configuration key with its type, default and meaning, read from the structs themselves.

The meaning of a key is the string under its field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types

from .settings import variants


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
        for struct in structs:
            below = f"{tag_field}: {struct.tag}" if tag_field and len(structs) > 1 else kind
            yield from _keys(struct, f"{path}.", below)


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
    if isinstance(value, str):
        return value or '""'
    return "null" if value is None else str(msgspec.to_builtins(value))


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
    return _SIMPLE.get(type(info), type(info).__name__.removesuffix("Type").lower())


def explanation(kind: type[msgspec.Struct]) -> str:
    """All keys as text: one line `key  type  (default)`, the meaning indented under it."""
    lines = []
    for key in keys(kind):
        when = f"  [{key.kind}]" if key.kind else ""
        default = "required" if key.default == "required" else f"default {key.default}"
        lines.append(f"{key.path}: {key.type} ({default}){when}")
        if key.meaning:
            lines.append(textwrap.fill(key.meaning, 100, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)
