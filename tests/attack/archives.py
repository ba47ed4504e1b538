"""Archives and data sets of strangers: names that lead out, bombs, lies; labels that do not fit."""

from __future__ import annotations

import io
import json
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from agent.camera.images import ImageFiles
from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from attack.case import Case, Outcome, damaged, drawn
from attack.pictures import picture, small
from attack.spoilt import spoilt

NAMES = (
    *(
        "a.png",
        "../out.png",
        "/abs.png",
        "..\\out.png",
        "a\x00b.png",
        "\x1b[2J.png",
        "x" * 200 + ".png",
        "a/" * 50 + "b.png",
    ),
    *(
        "\u202egnp.png",
        "C:\\a.png",
        "./a.png",
        "a.png/",
        "",
        " ",
        "con.png",
        "__MACOSX/a.png",
        "cat/a.png",
        "dog/a.png",
    ),
)
COCO: dict[str, Any] = {
    "images": [{"id": n, "file_name": f"{n}.png", "width": 48, "height": 32} for n in (1, 2)],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 3.5, 4], "area": 9.25, "iscrowd": 0}],
    "categories": [{"id": 3, "name": "dog"}, {"id": 5, "name": "cat"}],
}
MMOCR: dict[str, Any] = {
    "metainfo": {"category": [{"id": 0, "name": "dog"}]},
    "data_list": [
        {
            "img_path": "imgs/1.png",
            "height": 32,
            "width": 48,
            "instances": [
                {"polygon": [1, 2, 9, 2, 9, 8, 1, 8], "bbox": [1.0, 2, 9, 8], "bbox_label": 0, "ignore": False}
            ],
        }
    ],
}
_LINES = (
    "0 0.5 0.5 0.1 0.1",
    "1 1 1 1 1",
    "-1 0 0 0 0",
    "nan 0 0 0 0",
    "0 inf 0 0 0",
    "9" * 400 + " 0 0 0 0",
    "0 0 0",
    "",
    "x",
    "\x00",
)


CLASSIFIER = ModelSpec(path=Path("model.onnx"), task="classify", labels=("dog", "cat"))
DETECTOR = ModelSpec(path=Path("model.onnx"), task="detect", decoder="yolox", labels=("dog", "cat"))


def zipped(members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of a name for a second time
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name or "x"), content, compress_type=compression)
    return target.getvalue()


def archive(rng: Random) -> tuple[str, bytes]:
    """Return a fault's name and an archive that has it."""
    images = [(f"{rng.choice(('', 'cat/', 'dog/'))}{n}.png", small(".png")) for n in range(rng.choice((1, 3, 8)))]
    match rng.randrange(9):
        case 0:
            return "strange names", zipped([(rng.choice(NAMES), small(".png")) for _ in range(5)])
        case 1:
            return "a bomb", zipped([("a.png", bytes(64 << 20)), *images], zipfile.ZIP_DEFLATED)
        case 2:
            info = zipfile.ZipInfo("link.png")
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            target = io.BytesIO()
            with zipfile.ZipFile(target, "w") as opened:
                opened.writestr(info, "/etc/passwd")
            return "a link", target.getvalue()
        case 3:
            return "pictures with faults", zipped([(f"{n}.png", picture(rng)[1]) for n in range(5)])
        case 4:
            target = io.BytesIO()
            with tarfile.open(fileobj=target, mode="w:gz" if rng.random() < 0.5 else "w") as opened:
                for name, image in images:
                    member = tarfile.TarInfo(name)
                    member.size = len(image)
                    opened.addfile(member, io.BytesIO(image))
            return "a tar", target.getvalue()
        case 5:
            archive = bytearray(zipped(images))
            directory = archive.rindex(b"PK\x01\x02")
            at = directory + rng.choice((8, 10, 16, 20, 24, 28, 42))  # flags, method, checksum, sizes, name, place
            archive[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x01\x00\x01\x00", b"\x00\x00\x00\x80"))
            return "a directory that lies", bytes(archive)
        case 6:
            return "many members", zipped([(f"{n}.png", b"") for n in range(20_000)])
        case 7:
            return "the same name twice", zipped(
                [("a.png", small(".png")), ("b.png", b""), ("a.png", small(".png"))][::2]
            )
        case _:
            fault, content = damaged(rng, zipped(images))
            return fault, content


def _frames(content: bytes, folder: Path) -> Outcome:
    path = folder / "set.zip"
    path.write_bytes(content)
    before = sorted(folder.parent.rglob("*"))
    try:
        files = ImageFiles(path)
        for name in files.names[:10]:
            assert files.read(name).ndim == 3
        assert all(image.ndim == 3 for _, image in islice(read_images(parse_source(str(path))), 5))
    finally:
        assert sorted(folder.parent.rglob("*")) == before, "a file that an archive left"
    return None


def _labelled(spec: ModelSpec, path: Path, content: bytes) -> Outcome:
    path.write_bytes(content)
    images = open_task(spec).labelled_images(path)
    assert len(images) >= 0
    for image, _ in islice(iter(images), 5):
        assert image.ndim == 3
    return None


def cases(rng: Random, folder: Path) -> Iterator[Case]:
    """Archives of frames, and labelled images in each of their forms."""
    inside = folder / "archives"
    inside.mkdir(exist_ok=True)
    for _ in range(12):
        fault, content = archive(rng)
        yield Case(fault, partial(_frames, content, inside))
    for _ in range(4):
        fault, content = archive(rng)
        yield Case(
            f"labelled: {fault}",
            partial(_labelled, rng.choice((CLASSIFIER, DETECTOR)), folder / "labelled.zip", content),
        )
    two = [("1.png", small(".png")), ("2.png", small(".png"))]
    for document in drawn(spoilt(COCO), rng, 8):
        text = json.dumps(document).encode()
        yield Case(
            "COCO, anything for a value",
            partial(_labelled, DETECTOR, folder / "coco.zip", zipped([*two, ("i.json", text)])),
        )
    for _ in range(4):
        lines = "\n".join(rng.choice(_LINES) for _ in range(3)).encode()
        classes = rng.choice((b"dog\ncat\n", b"\xff\xfe", b"", b"dog\n" * 5000))
        members = [*two, ("1.txt", lines), ("2.txt", damaged(rng, lines)[1]), ("classes.txt", classes)]
        yield Case("YOLO, other lines", partial(_labelled, DETECTOR, folder / "yolo.zip", zipped(members)))
    for document in drawn(spoilt(MMOCR), rng, 6):
        text = json.dumps(document).encode()
        yield Case(
            "MMOCR, anything for a value",
            partial(_labelled, DETECTOR, folder / "mmocr.zip", zipped([*two, ("text.json", text)])),
        )
