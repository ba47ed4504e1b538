"""Decoders that are not ours: named 'package.module:function', or by an installed package.

A package names its decoders in the entry point group `tared.decoders` (PyPA, entry points specification).
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter

from agent.decoders import CandidateDecoder
from agent.errors import ConfigError

GROUP = "tared.decoders"


def installed_decoders() -> list[str]:
    """The names that installed packages give their decoders, each once."""
    return sorted(entry_points(group=GROUP).names)


def import_decoder(name: str) -> CandidateDecoder:
    """The function behind 'package.module:function' or behind an entry point of that name.

    Raises ConfigError (`decoder.import`): no such name, several packages with it, or nothing to call.
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
    return function  # type: ignore[no-any-return]  # its results are checked when it is called


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
