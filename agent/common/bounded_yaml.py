"""Read YAML that anybody may have written: JSON's types alone, within bounds, and each error with its line and column.

PyYAML's safe loader runs no code. But it makes dates of days, 90 of 1:30 and bytes of a tag, and overwrites a key that
comes twice without a word. A few hundred bytes of aliases grow into gigabytes once somebody walks through them.
"""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import yaml

_MOST_NODES = 10_000  # with every alias written out
_MOST_DEEP = 32
_PREFIX = "tag:yaml.org,2002:"
_TAGS = frozenset(_PREFIX + name for name in ("null", "bool", "int", "float", "str", "map", "seq", "merge"))
_DIGITS = {  # as YAML 1.1 has them, but for the sexagesimal ones: 03:00 is a time of day
    "int": r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)",
    "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)",
}


class YamlError(ValueError):
    """YAML that is not taken; the message says where, and what is wrong."""


class _Loader(yaml.SafeLoader):
    """A safe loader that is limited to the types of JSON."""

    def close(self) -> None:
        self.dispose()


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_PREFIX) not in (*_DIGITS, "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _DIGITS.items():
    _Loader.add_implicit_resolver(_PREFIX + _name, re.compile(f"({_pattern})$"), list("-+0123456789."))


def load_yaml(text: str) -> Any:
    """Return the document in a text. Raises YamlError."""
    try:
        with closing(_Loader(text)) as loader:
            root = loader.get_single_node()
            if root is None:
                return None
            _check(root)
            return loader.construct_document(root)
    except RecursionError:
        raise YamlError(f"more than {_MOST_DEEP} values inside each other") from None
    except yaml.MarkedYAMLError as error:
        raise _error(error.problem_mark or error.context_mark, error.problem or str(error)) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer with thousands of digits, say
        raise YamlError(" ".join(str(error).split())) from error


def _check(root: yaml.Node) -> None:
    """Raise YamlError for what is no JSON, or would grow beyond the bounds."""
    sizes: dict[int, int] = {}  # sizes of nodes that are whole, with every alias written out

    def size_of(node: yaml.Node, above: tuple[int, ...]) -> int:
        if id(node) in above:
            raise _error(node.start_mark, "an alias to a value that contains it")
        if id(node) in sizes:
            return sizes[id(node)]
        if node.tag not in _TAGS:
            raise _error(node.start_mark, f"a tag '{node.tag.replace(_PREFIX, '!!')}', which no key accepts")
        if len(above) >= _MOST_DEEP:
            raise _error(node.start_mark, f"more than {_MOST_DEEP} values inside each other")
        inside = (*above, id(node))
        total = 1 + sum(size_of(child, inside) for child in _children(node))
        if total > _MOST_NODES:
            raise _error(node.start_mark, f"more than {_MOST_NODES} values, with every alias written out")
        sizes[id(node)] = total
        return total

    size_of(root, ())


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    known: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error(key.start_mark, "a key that is not a word")
        if key.value in known:
            raise _error(key.start_mark, f"the key '{key.value}' a second time")
        known.add(key.value)
    return [part for pair in node.value for part in pair]


def _error(mark: yaml.Mark | None, problem: str) -> YamlError:
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return YamlError(f"{where}{problem}")
