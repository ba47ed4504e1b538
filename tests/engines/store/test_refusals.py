"""Files of refused candidates: the newest, whole, and no more of them than are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

from engines.store.retention import record_refusal


def test_the_newest_twenty_are_kept(tmp_path: Path) -> None:
    for number in range(25):
        path = record_refusal(tmp_path, f"{number:016x}", {"verdict": {"accepted": False}})
        os.utime(path, ns=(number, number))  # a file system's clock may be too coarse
    kept = sorted(path.name for path in (tmp_path / "refused").iterdir())
    assert kept == [f"{number:016x}.json" for number in range(5, 25)]
    document = json.loads((tmp_path / "refused" / kept[-1]).read_text())
    assert (document["schema"], document["id"], document["verdict"]) == (1, f"{24:016x}", {"accepted": False})
    assert document["ts"] > 1.7e9


def test_refused_again_it_has_one_file_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / ".0.json.1.new").write_text("half")
    for reason in ("first", "second"):
        path = record_refusal(tmp_path, "0", {"reason": reason})
    assert [each.name for each in (tmp_path / "refused").iterdir()] == ["0.json"]
    assert json.loads(path.read_text())["reason"] == "second"


def test_a_clock_that_was_set_back_does_not_cost_the_newest(tmp_path: Path) -> None:
    for number in range(20):
        path = record_refusal(tmp_path, f"{number}", {})
        os.utime(path, (4e9, 4e9))
    newest = record_refusal(tmp_path, "newest", {})
    assert newest.exists()
    assert len(list((tmp_path / "refused").iterdir())) == 20
