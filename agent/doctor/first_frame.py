"""`python -m agent.doctor.first_frame`: open the source named on stdin, and tell of its first frame in JSON."""

from __future__ import annotations

import json
import sys
import time

from agent.camera import read_images
from agent.source import parse_source
from calibrate.errors import TaredError


def main() -> None:
    """Entry point."""
    began_s = time.monotonic()
    try:
        _, image = next(iter(read_images(parse_source(sys.stdin.read()))))
        height, width = image.shape[:2]
        told = {"width": width, "height": height, "seconds": time.monotonic() - began_s}
    except TaredError as error:
        told = {"error": error.found, "remedy": error.remedy}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
