"""A search that is interrupted anywhere goes on with what was written, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import JsonValue

from agent.common.errors import AgentError
from agent.common.state_files import Journal

VALUES: dict[str, JsonValue] = {
    "a 0": {"loss": 0.1, "answers": [[6, None]], "latencies_ms": None},
    "a 1": [1, 2.5e-300, "ö\n"],
    "none": None,
    "ö": False,
}


def write(path: Path) -> None:
    journal = Journal(path, "model x")
    for key, value in VALUES.items():
        journal.put(key, value)


def read(path: Path) -> dict[str, JsonValue]:
    journal = Journal(path, "model x")
    return {key: value for key in VALUES if (value := journal.get(key)) is not None}


KNOWN = {key: value for key, value in VALUES.items() if value is not None}


def test_a_value_is_computed_once_over_all_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    computed: list[str] = []

    def compute() -> list[float]:
        computed.append("x")
        return [0.1, float("inf")]

    for _ in range(3):
        journal = Journal(path, "model x")
        assert journal.get_or_compute("gain", compute) == journal.get_or_compute("gain", compute) == [0.1, float("inf")]
        assert journal.get_or_compute("nothing", lambda: computed.append("y")) is None
    assert computed == ["x", "y"]
    assert os.listdir(tmp_path) == ["plan.journal"]


def test_a_file_cut_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    write(path)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        kept = dict(list(VALUES.items())[: max(0, lines - 1)])
        journal = Journal(path, "model x")
        assert {key: journal.get(key) for key in VALUES} == {key: kept.get(key) for key in VALUES}
        journal.put("after", cut)
        assert Journal(path, "model x").get("after") == cut
        assert path.read_bytes().count(b"\n") == max(lines, 1) + 1


DAMAGE = [
    *(b"\0\0\0\0\n", b"5\n", b"[[1], 2]\n", b'["a"]\n', b"{}\n", b"\xff\xfe\n", b"[5, 1]\n", b"[null, 1]\n"),
    *(b'"ab"\n', b'{"a": 1, "b": 2}\n', b"[" * 100_000 + b"\n", b'["a", 1' + b"0" * 400 + b"]\n"),
    b'["a", ' + b"[" * 900 + b"]" * 900 + b"]\n",  # could be read, and not be written again
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_lines_after_a_damaged_one_are_dropped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "plan.journal"
    write(path)
    head, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + lines[0] + damage + b"".join(lines[1:]))
    assert read(path) == {"a 0": VALUES["a 0"]}
    assert path.read_bytes() == head + lines[0]


@pytest.mark.parametrize(
    "content", [b"", b"no journal\n", b"\x89PNG\r\n\xff", b'{"schema": 2, "identity": "model x"}\n["a 0", 1]\n']
)
def test_a_file_that_is_no_journal_is_started_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.journal"
    path.write_bytes(content)
    assert read(path) == {}
    write(path)
    assert read(path) == KNOWN


def test_another_identity_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    write(path)
    assert read(path) == KNOWN
    assert Journal(path, "model y").get("a 0") is None
    assert read(path) == {}


def test_a_file_is_written_anew_with_the_newest_values_only(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    journal = Journal(path, "model x")
    for number in range(50):
        journal.put("same", number)
        journal.put(f"frame {number}", number)
    for number in range(49):
        del journal.values[f"frame {number}"]
    journal.shorten()
    assert path.read_bytes().count(b"\n") == 3
    journal.put("later", 1)
    again = Journal(path, "model x")
    assert again.values == {"same": 49, "frame 49": 49, "later": 1}
    path.unlink()
    path.mkdir()
    with pytest.raises(AgentError, match=r"plan\.journal"):
        journal.shorten()


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "plan.journal", tmp_path):
        with pytest.raises(AgentError, match=r"plan\.journal.*choose another place"):
            Journal(path, "model x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    journal = Journal(path, "model x")
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(AgentError, match=r"plan\.journal.*No space left.*free some space"):
        journal.put("a", 1)
    assert journal.get("a") is None
