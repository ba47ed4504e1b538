"""Import the decoders that users keep in packages of their own.

A spec names one as 'package.module:function', or by the name that an installed package gives it in the entry point
group `tared.decoders` (PyPA, entry points specification).
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb

from agent.common.errors import ConfigError
from agent.vision.boxes import Size
from agent.vision.decoders import CandidateDecoder, Outputs
from agent.vision.detections import Detections
from agent.vision.spec import DECODER_GROUP


def import_decoder(name: str) -> CandidateDecoder:
    """Return the function of a decoder that users keep in a package of their own.

    The returned function raises ConfigError (`decoder.failed`) where the user's raises anything.

    Args:
        name: 'package.module:function', or the name of an entry point in the group `tared.decoders`.

    Raises ConfigError:
        decoder.import  there is no such name, several packages have it, or it is nothing to call
    """
    entry = EntryPoint(name, name, DECODER_GROUP) if ":" in name else _entry_point(name)
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
            "a function (outputs, (height, width), score_threshold) -> agent.vision.detections.Detections",
            "correct the name after the colon",
        )

    def decode(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
        try:
            result: Detections = function(outputs, size, score_threshold)
        except Exception as error:  # it is the user's
            last = extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
            shapes = ", ".join(f"{output} {array.shape} {array.dtype}" for output, array in outputs.items())
            raise ConfigError(
                "decoder.failed",
                f"decoder '{name}' that raises {where}, with {shapes}, size {size}",
                "Detections of whatever the engine puts out, zeros as well",
                "correct the decoder function",
            ) from error
        return result  # its type is checked where all detections are

    return decode


def _entry_point(name: str) -> EntryPoint:
    entries = {entry.value: entry for entry in entry_points(group=DECODER_GROUP, name=name)}
    if len(entries) != 1:
        values = "".join(f", {value}" for value in sorted(entries))
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}' of {len(entries)} installed packages{values}",
            f"one entry point of that name in group '{DECODER_GROUP}'",
            "install the package that has it, or name the function as 'package.module:function'",
        )
    (entry,) = entries.values()
    return entry
