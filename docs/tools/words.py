"""Judge the words of tests and comments: `python -m docs.tools.words [FOLDER ...]`; exit code 1 if one is at fault.

Tests: their names, the names of their helpers, docstrings, ids of parameters and reasons of marks. The product:
comments that begin with "of", which say nothing without the line beside them.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from docs.tools.prose import sentences
from docs.tools.site import ROOT

PRODUCT = ("agent", "calibrate", "engines", "fleet", "benchmarks", "docs/tools", "examples")
LONGEST = 25  # words a sentence of a test's docstring
_WORDS = r"told|tell|tells|heard|hears|nobody|whoever"
_FIRST = re.compile(r"^test_(?:what|who|whose|whoever|it|one|nor|neither|of|that|so|no_one|nobody)_")
_IN_NAME = re.compile(rf"(?:^|_)(?:{_WORDS}|asked_for_it)(?:_|$)")
_IN_TEXT = re.compile(rf"\b(?:{_WORDS})\b", re.IGNORECASE)
_OPENING = re.compile(r"^(?:What|Who|Whose|Whoever)\b(?!.*\?$)")
_OF = re.compile(r"^#\s*of\b")

Fault = tuple[int, str]  # line number, what is wrong


def faults(path: Path) -> list[Fault]:
    """Return the faults of a Python file, from its top to its end."""
    source = path.read_text(encoding="utf-8")
    is_test = "tests" in path.parts
    return sorted(set(test_faults(source) if is_test else comment_faults(source)))


def test_faults(source: str) -> Iterator[Fault]:
    """Yield the faults of a file of tests.

    >>> list(test_faults("def test_who_is_told() -> None: ..."))
    [(1, "test_who_is_told: begins with 'who'"), (1, "test_who_is_told: 'told'")]
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from ((node.lineno, fault) for fault in _name_faults(node.name))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _docstring_faults(node)
        if isinstance(node, ast.keyword) and node.arg in ("id", "ids", "reason"):
            for each in ast.walk(node.value):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield from ((each.lineno, f"{each.value!r}: {word!r}") for word in _IN_TEXT.findall(each.value))


def _name_faults(name: str) -> Iterator[str]:
    if first := _FIRST.match(name):
        yield f"{name}: begins with {first[0].split('_', 1)[1].strip('_')!r}"
    if found := _IN_NAME.search(name):
        yield f"{name}: {found[0].strip('_')!r}"


def _docstring_faults(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Fault]:
    text = ast.get_docstring(node, clean=False)
    if text is None:
        return
    first = node.body[0].lineno - 1
    for number, sentence in sentences(re.sub(r"(?m)^\s*>>> .*", "", inspect.cleandoc(text))):
        count = len(sentence.split())
        if count > LONGEST:
            yield first + number, f"a sentence of {count} words; at most {LONGEST}: {sentence[:60]}..."
        if _OPENING.match(sentence):
            yield first + number, f"begins with What, Who or Whose: {sentence[:60]}"
        if found := _IN_TEXT.search(sentence):
            yield first + number, f"{found[0].lower()!r}: {sentence[:60]}"


def comment_faults(source: str) -> Iterator[Fault]:
    """Yield the comments that begin with "of", but for lines that go on with the comment above.

    >>> list(comment_faults("age = 3.0  # of the newest frame"))
    [(1, "begins with 'of': # of the newest frame")]
    >>> list(comment_faults("# How many seconds\\n# of a frame are left."))
    []
    """
    above = -1  # line of the last comment that has a line for itself
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, alone = token.start[0], token.line.strip().startswith("#")
            if _OF.match(token.string) and not (alone and above == line - 1):
                yield line, f"begins with 'of': {token.string}"
            above = line if alone else above


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Judge the words of tests and comments.")
    everything = [ROOT / name for name in (*PRODUCT, "tests")]
    parser.add_argument("folders", nargs="*", type=Path, default=everything, help="folders or files; all of them")
    options = parser.parse_args(arguments)
    folders: Counter[Path] = Counter()
    files = [file for each in options.folders for file in (sorted(each.rglob("*.py")) if each.is_dir() else [each])]
    for file in files:
        name = Path(os.path.relpath(file, ROOT))
        for number, fault in faults(file.resolve()):
            print(f"{name}:{number}: {fault}")
            folders[name.parent] += 1
    for folder, count in sorted(folders.items()):
        print(f"{count:4}  {folder}")
    if not folders:
        print(f"{len(files)} files of code read well")
    return 1 if folders else 0


if __name__ == "__main__":
    sys.exit(main())
