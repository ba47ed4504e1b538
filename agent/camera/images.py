"""Read the image files of a folder or a zip: one listing for cameras and data sets alike.

`decode_image` is also for pictures from elsewhere. A picture's header says how many pixels it has, and is read first: a
JPEG of 5 MB may decode to 4 GB.
"""

from __future__ import annotations

import errno
import io
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from lzma import LZMAError
from pathlib import Path, PurePosixPath

import cv2
import imagesize
import numpy as np
from numpy.typing import NDArray

from agent.camera.source import MAX_PIXELS
from agent.common.errors import AgentError, DatasetError
from engines.store.files import read_regular

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_FILE_BYTES = 256 << 20  # no photograph is larger; a zip could claim to be


class ImageFiles:
    """Images below a folder or in a zip, by their relative POSIX names; hidden files do not count.

    A zip stays open as long as the object lives.

    Raises DatasetError, or the `error_type` that the caller reports:
        images.missing     there is no such path
        images.none        it holds no image
        images.zip         the zip is damaged or encrypted, or a member leads out of the zip
        images.unreadable  one file, named, cannot be read, or has more than `max_pixels`
    """

    def __init__(self, path: Path, error_type: type[AgentError] = DatasetError, max_pixels: int = MAX_PIXELS) -> None:
        self.path = path
        self._max_pixels = max_pixels
        self._error_type = error_type
        self._read: Callable[[str, int], bytes]
        if path.is_dir():
            names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
            self._read = lambda name, most_bytes: read_regular(path / name, most_bytes)
        elif path.is_file():
            archive = self._open_zip()
            names = (member.filename for member in archive.infolist() if not member.is_dir())
            self._read = partial(_read_member, archive)
        else:
            raise error_type("images.missing", f"nothing at {path}", "a folder or a zip of images", "check the path")
        self.files = tuple(sorted(name for name in names if not _is_hidden(name)))
        self.names = tuple(name for name in self.files if PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES)
        if not self.names:
            found = f"no image among {len(self.files)} files in {path}"
            expected = f"files ending in {' '.join(sorted(IMAGE_SUFFIXES))}"
            raise error_type("images.none", found, expected, "point to the folder or zip that holds the images")

    def __len__(self) -> int:
        return len(self.names)

    def read(self, name: str) -> NDArray[np.uint8]:
        """Return the image as BGR uint8 (height, width, 3), turned upright where its EXIF data says so."""
        image = decode_image(self._content(name), self._max_pixels)
        if image is None:
            raise self._unreadable(name, f"an intact image of at most {self._max_pixels} pixels")
        return image

    def read_text(self, name: str, most_bytes: int = _MAX_FILE_BYTES) -> str:
        """Return a text file that lies beside the images, e.g. their labels. A longer one is unreadable."""
        try:
            return self._content(name, most_bytes).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise self._unreadable(name, "UTF-8 text") from None

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file as it is."""
        return self._content(name)

    def _content(self, name: str, most_bytes: int = _MAX_FILE_BYTES) -> bytes:
        try:
            return self._read(name, most_bytes)
        except (OSError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError):
            raise self._unreadable(name, f"an intact file of at most {most_bytes} bytes") from None

    def _unreadable(self, name: str, expected: str) -> AgentError:
        found = f"{name} in {self.path} cannot be read"
        return self._error_type("images.unreadable", found, expected, "replace or remove the file")

    def _open_zip(self) -> zipfile.ZipFile:
        try:
            archive = zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise self._refused_zip(f"{self.path} does not open: {error}") from None
        for member in archive.infolist():
            parts = PurePosixPath(member.filename.replace("\\", "/")).parts
            if ".." in parts or (parts and (parts[0] == "/" or ":" in parts[0])):
                raise self._refused_zip(f"{self.path} whose member '{member.filename}' leads out of the zip")
            if member.flag_bits & 1:
                raise self._refused_zip(f"{self.path} whose member '{member.filename}' is encrypted")
            if member.compress_type not in _METHODS:
                found = f"{self.path} whose member '{member.filename}' is compressed by method {member.compress_type}"
                raise self._refused_zip(found, "a zip that is stored, deflated, or compressed by bzip2 or LZMA")
            if member.file_size > _MAX_FILE_BYTES:
                raise self._refused_zip(f"{self.path} whose member '{member.filename}' claims {member.file_size} bytes")
        return archive

    def _refused_zip(self, found: str, expected: str = "an intact zip of plain image files") -> AgentError:
        return self._error_type("images.zip", found, expected, "pack or copy the zip again")


def _read_member(archive: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    """Return a member's content. Raises OSError for one that is larger than allowed, or than it claims."""
    with archive.open(name) as member:
        content = member.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", name)
    return content


def _is_hidden(name: str) -> bool:
    """Return True for files that operating systems leave behind, e.g. .DS_Store and macOS's __MACOSX/._photo.jpg."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def decode_image(content: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8] | None:
    """Decode to BGR uint8 (height, width, 3), turned upright where its EXIF data says so.

    None for a damaged image, and for one whose header claims more than `max_pixels`.
    """
    if not 0 < _claimed_pixels(content) <= max_pixels or not _holds_its_chunks(content):
        return None
    try:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # for want of memory, say
        return None
    return None if image is None else np.asarray(image, np.uint8)


def _holds_its_chunks(content: bytes) -> bool:
    """Return False for a PNG with a chunk that is longer than the rest of it: OpenCV would allocate what it claims."""
    if not content.startswith(_PNG):
        return True
    begin = len(_PNG)
    while begin + 8 <= len(content):
        length = int.from_bytes(content[begin : begin + 4], "big")
        begin += 12 + length  # with its name and its checksum
        if begin > len(content):
            return False
    return True


def _claimed_pixels(content: bytes) -> int:
    """Return the number of pixels by the header; 0 where it does not say."""
    try:
        width, height = imagesize.get(io.BytesIO(content))
    except Exception:  # whatever a parser raises for bytes that are no image
        return 0
    return int(max(0, width) * max(0, height))
