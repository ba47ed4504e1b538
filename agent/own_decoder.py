"""Decoders that are not ours: named 'package.module:function', or by an installed package.

A package names its decoders in the entry point group `tared.decoders` (PyPA, entry points specification).
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb

from agent.decoders import CandidateDecoder, Outputs, Size
from agent.detections import Detections
from agent.errors import ConfigError

GROUP = "tared.decoders"


def installed_decoders() -> list[str]:
    """The names that installed packages give their decoders, each once."""
    return sorted(entry_points(group=GROUP).names)


def import_decoder(name: str) -> CandidateDecoder:
    """The function behind 'package.module:function' or behind an entry point of that name.

    Raises ConfigError (`decoder.import`): no such name, several packages with it, or nothing to call. What comes back
    raises it, too (`decoder.failed`), where the function raises anything.
    """
    entry = EntryPoint(name, name, GROUP) if ":" in name else _entry_point(name)
    try:
        module = importlib.import_module(entry.module)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}' whose module fails to import: {type(error).__name__}: {error}",
            "an importable module",
            "install its package, or put its folder on PYTHONPATH",
        ) from error
    function_name = entry.attr or ""  # None where an entry point names a module alone
    try:
        function = attrgetter(function_name)(module)
    except AttributeError:
        function = None
    if not callable(function):
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}', and no function '{function_name}' in module '{entry.module}'",
            "a function (outputs, (height, width), score_threshold) -> agent.detections.Detections",
            "correct the name after the colon",
        )

    def decode(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
        try:
            found: Detections = function(outputs, size, score_threshold)
        except Exception as error:  # it is the user's
            shapes = ", ".join(f"{output} {array.shape} {array.dtype}" for output, array in outputs.items())
            raise ConfigError(
                "decoder.failed",
                f"decoder '{name}' that raises {_where(error)}, with {shapes}, size {size}",
                "Detections of whatever the engine puts out, zeros as well",
                "correct the decoder function",
            ) from error
        return found  # whether they are any is seen where all detections are checked

    return decode


def _where(error: Exception) -> str:
    """The error and the line of the user's that it came from."""
    last = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def _entry_point(name: str) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if len(found) != 1:
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}' of {len(found)} installed packages{''.join(f', {value}' for value in sorted(found))}",
            f"one entry point of that name in group '{GROUP}'",
            "install the package that has it, or name the function as 'package.module:function'",
        )
    (entry,) = found.values()
    return entry
