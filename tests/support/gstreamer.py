"""GStreamer and its bindings, which `make rtsp` installs: it serves and makes what cameras would, and is read by us.

The bindings are the system's, for its Python. An environment with --system-site-packages sees them, as on a board; to
the tests' own they are added.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import pytest

PYTHON = "/usr/bin/python3"  # the one that Debian's packages are for
WITH_BINDINGS = "import sys; sys.path.append('/usr/lib/python3/dist-packages')\n"  # of a program for our own Python
FOLLOWS_SIZES = pytest.mark.skipif(
    tuple(int(part) for part in cv2.__version__.split(".")[:2]) < (4, 13),
    reason="OpenCV until 4.12 repeats the last picture where the size changes",
)
_MAKER = Path(__file__).with_name("video_maker.py")


def require_gstreamer(module: str) -> None:
    """Skip where this part of it is missing. TARED_REQUIRE_RTSP=1 turns its absence into a failure."""
    asked = f"import gi; gi.require_version('{module}', '1.0'); from gi.repository import {module}"
    _require(asked, f"no {module} of GStreamer: apt-get install gir1.2-gst-rtsp-server-1.0, see `make rtsp`")


def require_bindings() -> None:
    """The same of bindings that our own Python can import: they are for one release of Python."""
    asked = f"{WITH_BINDINGS}import gi; gi.require_version('Gst', '1.0')"
    _require(asked, "no bindings of GStreamer for this Python: see `make rtsp`", sys.executable)


def _require(asked: str, message: str, python: str = PYTHON) -> None:
    """asked: a program, which this Python can run to its end where all is there."""
    done = subprocess.run([python, "-c", asked], capture_output=True, check=False) if shutil.which(python) else None
    if done is None or done.returncode != 0:
        if os.environ.get("TARED_REQUIRE_RTSP") == "1":
            pytest.fail(message)
        pytest.skip(message)


def make_video(kind: str, path: Path) -> Path:
    """A file of `video_maker.py`; skips where GStreamer has no such encoder."""
    path.write_bytes(_video(kind, path.suffix))
    return path


@functools.cache  # some tenths of a second of work, a few 10 kB each
def _video(kind: str, suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video{suffix}"
        done = subprocess.run([PYTHON, str(_MAKER), kind, str(path)], capture_output=True, text=True, check=False)
        if done.returncode != 0 and "no element" in done.stderr and os.environ.get("TARED_REQUIRE_RTSP") != "1":
            pytest.skip(f"GStreamer cannot make {kind}: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        return path.read_bytes()
