"""The short form of `make attack`, and that it would notice what it looks for."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from agent.common.errors import AgentError
from attack import campaign
from attack.campaign import Tally, run, table
from attack.case import MOST_KIB, Case, Kind, judge
from attack.kinds import KINDS
from attack.onnx_files import broken_files
from fleet.cli.main import main

SHORT_S = 12.0  # of the campaign, whose workers need some seconds more to end
COMMANDS = 26  # of the broken models that go through the command


@pytest.mark.trial
def test_nothing_breaks_in_a_short_campaign(tmp_path: Path) -> None:
    tallies = {kind: Tally() for kind in KINDS}
    until_s = time.monotonic() + SHORT_S
    threads = [
        threading.Thread(target=run, args=(kind, iter(range(1000, 2000)), until_s, tally, tmp_path / str(number)))
        for number, (kind, tally) in enumerate(tallies.items())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [words for tally in tallies.values() for words in tally.broken] == []
    assert all(tally.counts["refused cleanly"] for tally in tallies.values()), table(tallies)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ONNX"])
def test_no_kind_of_input_breaks_anything_with_one_seed(kind: str, tmp_path: Path) -> None:
    for case in KINDS[kind](Random(7), tmp_path):
        verdict, why = judge(case)
        assert verdict != "BROKEN", (case.name, why)


def test_broken_models_end_in_an_error_with_a_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a command: one line of an error, or a spec."""
    monkeypatch.setattr("agent.inspection.graph_run._MOST_S", 5.0)  # of one that never ends
    path = tmp_path / "model.onnx"
    refused = 0
    for name, content in broken_files(Random(3), COMMANDS):
        path.write_bytes(content)
        code = main(["inspect", str(path), "--json"])
        output, errors = capfd.readouterr()
        assert code in (0, 2), name
        assert "Traceback" not in errors
        if code == 2:
            refused += 1
            error = json.loads(output)["error"]
            assert all(error[part] for part in ("code", "found", "expected", "remedy")), (name, error)
            assert errors.startswith(f"error: {error['code']}: "), errors
    assert refused > COMMANDS // 3


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("attempt", "verdict"),
    [
        (lambda: None, "survived"),
        (lambda: "refused cleanly", "refused cleanly"),
        (partial(_raise, AgentError("a.b", "found", "expected", "remedy")), "refused cleanly"),
        (partial(_raise, AgentError("a.b", "found", "expected", "")), "BROKEN"),
        (partial(_raise, ValueError("a bug")), "BROKEN"),
        (partial(_raise, MemoryError()), "BROKEN"),
    ],
)
def test_a_case_is_judged(attempt: object, verdict: str) -> None:
    assert judge(Case("a case", attempt)).verdict == verdict  # type: ignore[arg-type]  # a lambda


def test_a_case_that_takes_memory_or_time_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Case("a case", lambda: None)
    with monkeypatch.context() as grown:
        grown.setattr("attack.case._peak_kib", iter((0, MOST_KIB + 1)).__next__)
        assert judge(sound) == ("BROKEN", "400 MiB more memory")
    monkeypatch.setattr("attack.case.MOST_S", -1.0)
    assert judge(sound).verdict == "BROKEN"


def hanging(_rng: Random, _folder: Path) -> Iterator[Case]:
    yield Case("sound", lambda: None)
    yield Case("hangs", lambda: time.sleep(600.0))


def ending(_rng: Random, _folder: Path) -> Iterator[Case]:
    yield Case("ends", lambda: sys.exit(3))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("hanging", "hangs: no answer within", marks=pytest.mark.trial),
        ("ending", "ends: the process ended"),
    ],
)
def test_a_worker_that_hangs_or_ends_is_a_broken_case(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = (
        "import sys, attack.kinds, attack.worker, attack.test_attack as test; "
        "attack.worker.KINDS = {'hanging': test.hanging, 'ending': test.ending}; sys.exit(attack.worker.main())"
    )
    monkeypatch.setattr(campaign, "WORKER", ("-c", worker))
    monkeypatch.setattr(campaign, "SILENCE_S", 30.0)
    tally = Tally()
    run(kind, iter([1]), time.monotonic() + 120.0, tally, tmp_path)
    (broken,) = tally.broken
    assert words in broken
    assert tally.counts["survived"] == (kind == "hanging")


def test_equal_seeds_are_equal_cases(tmp_path: Path) -> None:
    def names(kind: Kind) -> list[str]:
        return [case.name for case in kind(Random(5), tmp_path)]

    for name in ("YAML", "pictures", "HTTP", "MQTT, uploads, chunks"):
        assert names(KINDS[name]) == names(KINDS[name])
    assert list(broken_files(Random(5), 40)) == list(broken_files(Random(5), 40))
