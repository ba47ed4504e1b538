"""Is the cause that an alarm names first the true one? The conditions of the corruption ladder, on real clips.

`python -m benchmarks.causes`

The thresholds were set on one clip, `vehicles`; the others did not tune them. Of each clip 24 frames show how the view
was, and 24 others how it is under each condition and severity. Darkness, night and brightness are light.
"""

from __future__ import annotations

import argparse
import math
from itertools import islice, product

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.monitoring.causes import Appearance, AppearanceHistory
from agent.monitoring.view import FrameFeatures
from benchmarks.corruption import CONDITIONS, SEVERITIES, Image, corrupt
from benchmarks.models import DATA
from benchmarks.report import Section, add_output_option, at_least, bars_section, publish

TUNED = "vid_vehicle_surveillance_640x352.mp4"
_CAUSES = {"dark": "light", "night": "light", "bright": "light"}
_FRAMES = 24
_MOST_READ = 300


def clips() -> dict[str, list[Image]]:
    """Return 48 frames of every clip, evenly spread, by its file's name."""
    found: dict[str, list[Image]] = {}
    for path in sorted(DATA.glob("vid_*")):
        images = [image for _, image in islice(read_images(parse_source(str(path))), _MOST_READ)]
        found[path.name] = [images[len(images) * number // (2 * _FRAMES)] for number in range(2 * _FRAMES)]
    return found


def named(images: list[Image], condition: str, severity: int) -> str:
    """The first cause that is named where the odd frames are under a condition."""
    history = AppearanceHistory()
    for number, image in enumerate([*images[::2], *images[1::2]]):
        is_now = number >= len(images[::2])
        shown = corrupt(image, condition, severity, number) if is_now else image
        history.add(Appearance.from_features(FrameFeatures.from_image(shown), math.nan))
    return history.changes[0].cause


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Does an alarm name the true cause first?")
    add_output_option(parser)
    options = parser.parse_args()
    section = Section("Causes named rightly, of five severities", ("clip", *CONDITIONS, "unchanged"))
    right = total = 0
    for clip, images in clips().items():
        hits = dict.fromkeys(CONDITIONS, 0)
        for condition, severity in product(CONDITIONS, SEVERITIES):
            hits[condition] += named(images, condition, severity) == _CAUSES.get(condition, condition)
        unchanged = named(images, "dark", 0)
        section.rows.append((clip, *(str(hits[condition]) for condition in CONDITIONS), unchanged))
        if clip != TUNED:
            right, total = right + sum(hits.values()), total + len(CONDITIONS) * len(SEVERITIES)
    bar = at_least(f"share of {total} conditions on clips that did not tune it", 0.8, right / total, "")
    publish([section, bars_section([bar])], options)


if __name__ == "__main__":
    main()
