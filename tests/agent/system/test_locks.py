"""The locks: every file that may be installed has its hash there, in the versions of constraints.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

LOCKS = sorted((ROOT / "locks").glob("*.txt"))
PIN = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; (.+?))?(?: \\)?$", re.MULTILINE)
BOARDS = ("jetson", "openvino")  # sets for a board; others are for a checkout


def pins(text: str) -> set[tuple[str, str]]:
    return {(name, version) for name, version, _ in PIN.findall(text)}


def test_there_is_a_lock_for_each_way_to_install() -> None:
    assert {path.stem for path in LOCKS} == {*BOARDS, "run", "test"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"{lock.relative_to(ROOT)}: EXTRAS :=" in makefile for lock in LOCKS)
    assert "$(LOCKED) locks/run.txt" in makefile
    assert "--require-hashes" in makefile
    for page in ("docs/start/jetson.md", "containers/Containerfile.l4t"):
        assert "--require-hashes" in (ROOT / page).read_text()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_pin_has_hashes_and_the_version_of_the_constraints(lock: Path) -> None:
    text = lock.read_text()
    blocks = re.split(r"\n(?=\S)", text.rstrip("\n"))
    assert len(blocks) > 40
    assert all(re.fullmatch(r"\S+==.+?(?: \\\n    --hash=sha256:[0-9a-f]{64})+", block) for block in blocks)
    names = {name for name, _ in pins((ROOT / "constraints.txt").read_text())}
    ours = {(name, version) for name, version in pins(text) if name in names}
    assert ours - pins((ROOT / "constraints.txt").read_text()) == set()
    assert {"setuptools", "numpy", "onnx", "onnxruntime", "paho-mqtt", "cryptography"} <= {
        name for name, _ in pins(text)
    }


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    """As pip does it: the name and version are right, the content is not."""
    wheel = tmp_path / "six-1.17.0-py2.py3-none-any.whl"
    wheel.write_bytes(b"PK\x05\x06" + bytes(18))
    lock = (ROOT / "locks/test.txt").read_text()
    (entry,) = re.findall(r"^six==1\.17\.0 .*(?:\n    --hash=\S+(?: \\)?)+", lock, re.MULTILINE)
    (tmp_path / "six.txt").write_text(entry + "\n")
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--no-index"]
    arguments = ["--find-links", str(tmp_path), "--target", str(tmp_path / "site"), "--require-hashes"]
    done = subprocess.run(
        [*pip, *arguments, "-r", str(tmp_path / "six.txt")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
