"""`python -m agent.doctor.first_frame`: open the camera configured on stdin, and print its first frame's size.

The output is one JSON object: width, height and seconds, or error and remedy.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

from agent.camera.config import CameraConfig
from agent.camera.reader import read_images
from agent.camera.source import WHOLE
from calibrate.errors import TaredError


def main() -> None:
    """Entry point."""
    started_s = time.monotonic()
    try:
        camera = CameraConfig.model_validate_json(sys.stdin.read())
        _, image = next(iter(read_images(replace(camera.to_source(), framing=WHOLE))))
        height, width = image.shape[:2]
        report = {"width": width, "height": height, "seconds": time.monotonic() - started_s}
    except TaredError as error:
        report = {"error": error.found, "remedy": error.remedy}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
