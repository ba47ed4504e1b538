"""Pictures that no camera takes: cut, spliced, and with headers that lie; streams of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import cv2
import numpy as np

from agent.camera.images import ImageFiles, decode_image
from agent.camera.mjpeg import JpegSplitter
from attack.case import Case, Outcome, damaged

SUFFIXES = (".bmp", ".jpg", ".png", ".ppm", ".tif", ".webp")
STARTS = (
    b"",
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"II*\0",
    b"MM\0*",
    b"RIFF\xff\xff\xff\xffWEBP",
    b"BM",
    b"P6 ",
    b"GIF89a",
)
_START_OF_FRAME = b"\xff\xc0\x00\x11\x08"
_SIDES = (0, 1, 7, 32000, 65535)
_MOST_PIXELS = 1 << 24


def small(suffix: str = ".jpg") -> bytes:
    return cv2.imencode(suffix, np.zeros((32, 48, 3), np.uint8))[1].tobytes()


def jpeg_claiming(height: int, width: int) -> bytes:
    """A JPEG of a few hundred bytes that claims so many pixels; to the end of its data libjpeg decodes it."""
    content = small()
    at = content.index(_START_OF_FRAME) + len(_START_OF_FRAME)
    return content[:at] + struct.pack(">HH", height, width) + content[at + 4 :]


def png_claiming(height: int, width: int) -> bytes:
    """A PNG whose header, with its checksum, claims so many pixels."""
    content = small(".png")
    header = content[12:16] + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def chunk(name: bytes, content: bytes, length: int | None = None) -> bytes:
    """A chunk of a PNG; with another length than its own, it lies."""
    size = len(content) if length is None else length
    return struct.pack(">I", size) + name + content + struct.pack(">I", zlib.crc32(name + content))


def animated_png(rng: Random) -> bytes:
    """A PNG with frames larger than its canvas, or many of them, and chunks of any length."""
    whole = small(".png")
    count, side = rng.choice((0, 1, 2, 2**31 - 1)), rng.choice(_SIDES)
    control = struct.pack(">IIIIIHHBB", 0, side, rng.choice(_SIDES), rng.choice((0, 2**31)), 0, 1, 0, 9, 9)
    chunks = chunk(b"acTL", struct.pack(">II", count, 0)) + chunk(b"fcTL", control)
    named = chunk(
        rng.choice((b"fdAT", b"zTXt", b"iCCP", b"PLTE", b"eXIf")), rng.randbytes(30), rng.choice((None, 2**31 - 1))
    )
    return whole[:33] + chunks + named + whole[33:]


def picture(rng: Random) -> tuple[str, bytes]:
    """Return a fault's name and a picture that has it."""
    height, width = rng.choice(_SIDES), rng.choice(_SIDES)
    match rng.randrange(7):
        case 6:
            return "a PNG of odd chunks", animated_png(rng)
        case 0:
            return "a JPEG whose header lies", jpeg_claiming(height, width)
        case 1:
            return "a PNG whose header lies", png_claiming(height, width)
        case 2:
            most = rng.choice((255, 0, 65535, 10**20))
            text = f"P{rng.choice('3456')}\n# {'x' * rng.choice((0, 5000))}\n{width} {height}\n{most}\n"
            return "a PPM whose header lies", text.encode() + rng.randbytes(300)
        case 3:
            bitmap = bytearray(small(".bmp"))
            struct.pack_into(
                "<ii", bitmap, 18, rng.choice((width, -width, 2**31 - 1)), rng.choice((height, -height, -(2**31)))
            )
            return "a BMP whose header lies", bytes(bitmap)
        case 4:
            return "a start and noise", rng.choice(STARTS) + rng.randbytes(rng.choice((0, 10, 3000)))
        case _:
            suffix = rng.choice(SUFFIXES)
            fault, content = damaged(rng, small(suffix))
            return f"{suffix}, {fault}", content


def _decode(content: bytes) -> Outcome:
    image = decode_image(content, _MOST_PIXELS)
    if image is None:
        return "refused cleanly"
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[0] * image.shape[1] <= _MOST_PIXELS
    return None


def _in_folder(content: bytes, folder: Path) -> Outcome:
    (folder / "one.png").write_bytes(content)
    assert ImageFiles(folder).read("one.png").ndim == 3
    return None


def _stream(chunks: list[bytes]) -> Outcome:
    splitter, cut = JpegSplitter(), 0
    for chunk in chunks:
        for whole in splitter.feed(chunk):
            cut += len(whole or b"")
            if whole is not None:
                _decode(whole)
    assert cut <= sum(map(len, chunks))
    return None


def cases(rng: Random, folder: Path) -> Iterator[Case]:
    """Single pictures, in memory and in a folder, and what a camera of MJPEG sends."""
    (folder / "pictures").mkdir(exist_ok=True)
    for _ in range(20):
        fault, content = picture(rng)
        yield Case(fault, partial(_decode, content))
    for _ in range(4):
        fault, content = picture(rng)
        yield Case(f"in a folder: {fault}", partial(_in_folder, content, folder / "pictures"))
    for _ in range(4):
        parts = [
            rng.choice((small(), picture(rng)[1], b"--frame\r\nContent-Length: 99999999\r\n\r\n")) for _ in range(12)
        ]
        sent = b"".join(parts)
        size = rng.choice((1, 7, 500, 1 << 16))
        yield Case("a stream", partial(_stream, [sent[at : at + size] for at in range(0, len(sent), size)]))
