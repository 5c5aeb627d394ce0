"""What a key of the configuration may hold, in words, for the errors of `config.py`.

In: the record, the way to a key and the value that was found. Out: text.
"""

import difflib
from collections.abc import Sequence
from typing import Any

import tomli_w
from msgspec import inspect

LARGEST = 1e30
"""Above every number that could be meant; TOML can say inf."""


def find_value(tree: Any, parts: Sequence[str]) -> Any:
    """What a tree has at the end of a way of keys, as far as it can be gone."""
    for part in parts:
        tree = tree[part] if isinstance(tree, dict) and part in tree else tree
    return tree


def expectation(record: type, parts: Sequence[str], found: Any) -> tuple[str, str, str]:
    """What the key may hold in words, its default as TOML, and a nearby right value; each "" when there is none."""
    kind, default = inspect.type_info(record), None
    for part in parts:
        fields = {field.name: field for field in getattr(kind, "fields", ())}
        if part not in fields:
            return "", "", ""
        kind, default = fields[part].type, fields[part].default
    example = ""
    if isinstance(default, str | int | float):
        example = tomli_w.dumps({"value": default}).removeprefix("value = ").strip()
    near = ""
    if isinstance(kind, inspect.LiteralType):
        matches = difflib.get_close_matches(str(found), kind.values, n=1, cutoff=0.4)
        near = f'did you mean "{matches[0]}"?' if matches else ""
    return _in_words(kind, found), example, near


def _in_words(kind: inspect.Type, found: Any) -> str:
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        bounds = [(">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt)]
        stated = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound not in (None, LARGEST))
        return f"{'an integer' if isinstance(kind, inspect.IntType) else 'a number'} {stated}".strip()
    if isinstance(kind, inspect.StructType | inspect.DictType):
        return "" if isinstance(found, dict) else "a table of keys"
    words = {inspect.StrType: "a string", inspect.BoolType: "true or false", inspect.VarTupleType: "a list, as [...]"}
    return words.get(type(kind), "")
