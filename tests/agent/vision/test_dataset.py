from __future__ import annotations

import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from agent.camera.images import ImageFiles
from agent.common.errors import DatasetError
from agent.vision.datasets.labelled_images import ClassifiedImages, object_images


def png(width: int = 20, height: int = 10, value: int = 0) -> bytes:
    return cv2.imencode(".png", np.full((height, width, 3), value, np.uint8))[1].tobytes()


def store(path: Path, files: dict[str, bytes]) -> Path:
    """The same files as a folder, or as a zip where the path says so."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.fixture(params=["folder", "images.zip"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_lists_images_sorted_and_leaves_hidden_files_out(place: Path) -> None:
    names = ["b.PNG", "a/2.jpg", "a/10.webp", "notes.txt", ".hidden.png", "__MACOSX/._b.png"]
    files = ImageFiles(store(place, {name: png() for name in names}))
    assert files.names == ("a/10.webp", "a/2.jpg", "b.PNG")
    assert files.files == ("a/10.webp", "a/2.jpg", "b.PNG", "notes.txt")
    assert len(files) == 3


def test_reads_bgr(place: Path) -> None:
    image = np.arange(10 * 20 * 3, dtype=np.uint8).reshape(10, 20, 3)
    gray = np.full((4, 4), 7, np.uint8)
    content = {name: cv2.imencode(".png", pixels)[1].tobytes() for name, pixels in (("c.png", image), ("g.png", gray))}
    files = ImageFiles(store(place, content))
    assert np.array_equal(files.read("c.png"), image)
    assert np.array_equal(files.read("g.png"), np.full((4, 4, 3), 7))


@pytest.mark.parametrize("content", [b"", b"not an image", png()[:40]])
def test_an_unreadable_image_is_named(place: Path, content: bytes) -> None:
    files = ImageFiles(store(place, {"good.png": png(), "x/bad.png": content}))
    files.read("good.png")
    with pytest.raises(DatasetError, match=r"x/bad\.png") as caught:
        files.read("x/bad.png")
    assert caught.value.code == "images.unreadable"


def test_nothing_there_and_nothing_in_it(place: Path) -> None:
    with pytest.raises(DatasetError, match="nothing at"):
        ImageFiles(place)
    with pytest.raises(DatasetError, match="no image among 1 files"):
        ImageFiles(store(place, {"a.txt": b"1"}))


@pytest.mark.parametrize("name", ["../a.png", "/a.png", "x/../../a.png", "..\\a.png", "C:/a.png"])
def test_a_zip_member_that_climbs_out_is_refused(tmp_path: Path, name: str) -> None:
    path = store(tmp_path / "a.zip", {"good.png": png(), name: png()})
    with pytest.raises(DatasetError, match="leads out") as caught:
        ImageFiles(path)
    assert caught.value.code == "images.zip"


def test_a_damaged_zip_is_named(tmp_path: Path) -> None:
    path = store(tmp_path / "a.zip", {"a.png": png()})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"a\.zip does not open"):
        ImageFiles(path)
    path.write_bytes(whole.replace(whole[40:60], bytes(20)))  # inside the compressed image
    with pytest.raises(DatasetError, match=r"a\.png in .*a\.zip cannot be read"):
        ImageFiles(path).read("a.png")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_is_named_whatever_compresses(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.png", png())
    assert ImageFiles(path).read("a.png").size
    whole = path.read_bytes()
    for begin in range(40, whole.index(b"PK\x01\x02") - 8, 4):  # one error or another, by where it is
        path.write_bytes(whole[:begin] + b"\xff" * 8 + whole[begin + 8 :])
        with pytest.raises(DatasetError, match=r"a\.png in .*a\.zip cannot be read"):
            ImageFiles(path).read("a.png")


def test_a_zip_of_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    path = store(tmp_path / "a.zip", {"a.png": png()})
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")
    path.write_bytes(whole[: entry + 10] + b"\x09" + whole[entry + 11 :])  # Deflate64, of some packers
    with pytest.raises(DatasetError, match="by method 9"):
        ImageFiles(path)


def test_zip_members_that_are_encrypted_or_claim_too_much_are_refused(tmp_path: Path) -> None:
    path = store(tmp_path / "a.zip", {"a.png": png()})
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")  # the central directory, which zip readers trust
    path.write_bytes(whole[: entry + 8] + b"\x01" + whole[entry + 9 :])
    with pytest.raises(DatasetError, match="encrypted"):
        ImageFiles(path)
    path.write_bytes(whole[: entry + 24] + b"\xff\xff\xff\x7f" + whole[entry + 28 :])
    with pytest.raises(DatasetError, match="claims 2147483647 bytes"):
        ImageFiles(path)


def test_a_folder_is_a_class(place: Path) -> None:
    store(place, {"dog/1.png": png(value=1), "cat/1.png": png(value=2), "x/cat/0.png": png(value=3)})
    images = ClassifiedImages(place)
    assert images.classes == ("cat", "dog")
    assert [(int(image[0, 0, 0]), class_id) for image, class_id in images] == [(2, 0), (1, 1), (3, 0)]
    assert [class_id for _, class_id in ClassifiedImages(place, ("dog", "eel", "cat"))] == [2, 0, 2]


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        (["cat/1.png"], ("dog", "eel"), "folder 'cat'"),
        (["cat/1.png"], ("cat", "cat"), "folder 'cat'"),
        (["cat/1.png", "2.png"], (), "folder ''"),
    ],
)
def test_a_folder_must_be_one_label(place: Path, names: list[str], labels: tuple[str, ...], message: str) -> None:
    store(place, dict.fromkeys(names, png()))
    with pytest.raises(DatasetError, match=message):
        ClassifiedImages(place, labels)


LINE = b"1 0.5 0.5 0.5 0.2\n"


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/train2017/a.png", "labels/train2017/a.txt"),
        ("images/b/images/a.png", "images/b/labels/a.txt"),
        ("images/b/images/a.png", "labels/b/images/a.txt"),
        ("a.png", "a.txt"),
        ("x/a.png", "x/labels/a.txt"),
    ],
)
def test_yolo_layouts(place: Path, image: str, label: str) -> None:
    images = object_images(store(place, {image: png(), label: b"\n" + LINE + b"0 0.25 0.5 0.5 1 \n"}))
    ((pixels, truth),) = images
    assert pixels.shape == (10, 20, 3)
    assert truth.classes.tolist() == [1, 0]
    np.testing.assert_allclose(truth.boxes, [[5, 4, 15, 6], [0, 0, 10, 10]], atol=1e-5)


def test_an_image_without_label_file_shows_nothing(place: Path) -> None:
    images = object_images(store(place, {"a.png": png(), "a.txt": LINE, "b.png": png(), "c.png": png(), "c.txt": b""}))
    assert [len(truth) for _, truth in images] == [1, 0, 0]
    assert len(images) == 3


def test_images_without_any_label_file_are_no_data_set(place: Path) -> None:
    with pytest.raises(DatasetError, match="no label file for any of 1 images"):
        object_images(store(place, {"images/a.png": png(), "annotations/a.txt": LINE}))


def test_classes_are_matched_by_name(place: Path) -> None:
    store(place, {"a.png": png(), "a.txt": LINE, "classes.txt": b"car\nperson\n"})
    ((_, truth),) = object_images(place, ("person", "bicycle", "car"))
    assert truth.classes.tolist() == [0]
    with pytest.raises(DatasetError, match=r"class 'person' in classes\.txt"):
        object_images(place, ("car",))


@pytest.mark.parametrize(
    "line",
    [
        "2 .5 .5 .1 .1",
        "0.5 .5 .5 .1 .1",
        "0 1.5 .5 .1 .1",
        "0 .5 .5 .1",
        "x",
    ],
)
def test_a_wrong_label_is_named(place: Path, line: str) -> None:
    store(place, {"a.png": png(), "a.txt": LINE + line.encode(), "classes.txt": b"car\nperson\n"})
    with pytest.raises(DatasetError, match=r"a\.txt:2") as caught:
        list(object_images(place))
    assert caught.value.code == "dataset.label"


def test_labels_that_are_no_text_are_named(place: Path) -> None:
    with pytest.raises(DatasetError, match=r"a\.txt in"):
        list(object_images(store(place, {"a.png": png(), "a.txt": b"\xff\xfe\x00"})))
