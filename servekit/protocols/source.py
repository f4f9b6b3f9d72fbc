"""Python source as text: literals, docstrings, names and lines in the form that formatters leave alone.

Text from a document that a server sent may hold anything. Nothing of it becomes code here but inside
of a quoted literal, and a name is made of letters, digits and underscores.
"""

import builtins
import keyword
import re
from collections.abc import Container, Iterable
from textwrap import dedent
from typing import Any, Final, cast

WIDTH: Final = 88
"""Columns of a line; the default of ruff and black."""


def quoted(text: str) -> str:
    """Return a string literal, in the quotes that need fewer escapes."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + "".join(_escaped(char, quote) for char in text) + quote


def _escaped(char: str, quote: str) -> str:
    if char in (quote, "\\"):
        return f"\\{char}"
    return char if char.isprintable() or char in "\"'" else repr(char)[1:-1]


def literal(value: Any) -> str:
    """Return a JSON value as a Python literal of one line."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, cast('Iterable[Any]', value)))}]"
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return f"{{{', '.join(f'{quoted(k)}: {literal(v)}' for k, v in table.items())}}}"
    return repr(value)


def docstring(text: str, indent: str) -> list[str]:
    """Return the lines of a docstring; none for an empty text."""
    clean = "".join(
        char if char == "\n" or (char.isprintable() and char != "\\") else _in_docstring(char)
        for char in text.expandtabs(4).replace("\r\n", "\n").strip()
    )
    first, *rest = [line.rstrip() for line in clean.replace('"""', '\\"\\"\\"').split("\n")]
    rest = dedent("\n".join(rest)).split("\n") if rest else []
    if not first:
        return []
    opening = f'{indent}"""{" " * first.startswith(chr(34))}{first}'
    if not rest:
        return [f'{opening}{" " * first.endswith(chr(34))}"""']
    return [opening, *(f"{indent}{line}".rstrip() for line in rest), f'{indent}"""']


def _in_docstring(char: str) -> str:
    return "\\\\" if char == "\\" else repr(char)[1:-1]


def identifier(text: str, *, capital: bool = False) -> str:
    """Return the nearest text that can be a Python name; `capital` makes a class's."""
    words = [word for word in re.split(r"[^A-Za-z0-9_]+", text) if word]
    if capital:
        words = [word[0].upper() + word[1:] for word in words]
    name = ("" if capital else "_").join(words).lstrip("_") or "_"
    if name[0].isdecimal() or name == "_":
        name = f"{'N' if capital else 'n'}{name}"
    return f"{name}_" if is_taken(name) else name


def is_taken(name: str) -> bool:
    """Return whether a name is Python's own: a keyword, or a builtin that code may need."""
    return keyword.iskeyword(name) or name in vars(builtins)


def is_name(text: str) -> bool:
    """Return whether a text can be an attribute's name as it is."""
    return (
        text.isascii()
        and text.isidentifier()
        and not keyword.iskeyword(text)
        and not text.startswith("_")
    )


def is_parameter(text: str) -> bool:
    """Return whether a text can be a parameter's name as it is."""
    return text.isidentifier() and not keyword.iskeyword(text) and text not in ("self", "__debug__")


def free_name(name: str, taken: Container[str]) -> str:
    """Return the name, or with a number behind it the first one that isn't taken."""
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}{count}"
    return free


def bracketed(head: str, items: Iterable[str], tail: str, indent: str = "") -> list[str]:
    """Return `head`, items, and `tail`, on one line if they fit there, else an item on each."""
    parts = list(items)
    line = f"{indent}{head}{', '.join(parts)}{tail}"
    if len(line) <= WIDTH or not parts:
        return [line]
    return [f"{indent}{head}", *(f"{indent}    {part}," for part in parts), f"{indent}{tail}"]
