"""`python -m agent.doctor.first_frame`: open the camera configured on stdin, and tell of its first frame in JSON."""

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
    began_s = time.monotonic()
    try:
        camera = CameraConfig.model_validate_json(sys.stdin.read())
        _, image = next(iter(read_images(replace(camera.opened(), framing=WHOLE))))
        height, width = image.shape[:2]
        told = {"width": width, "height": height, "seconds": time.monotonic() - began_s}
    except TaredError as error:
        told = {"error": error.found, "remedy": error.remedy}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
