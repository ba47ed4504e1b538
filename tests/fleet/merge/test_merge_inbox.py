"""Chunks from boards that may send anything: bounded, checked, and apart from each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from merge_bench import FACTS
from pydantic import JsonValue

from agent.common.errors import AgentError
from agent.contract.histograms import MAX_UPLOAD_BYTES, Upload, write_upload
from agent.contract.wire import MessageError
from calibrate.histogram import AbsHistogram
from fleet.merge import inbox as merge_inbox
from fleet.merge.inbox import AnnouncedUpload, UploadInbox


def upload(seed: int = 0) -> Upload:
    """Of several chunks: large counts are noisy."""
    counts = np.random.default_rng(seed).integers(1, 1 << 40, (4, 4096))
    amax = float(np.float32(0.99999))
    return Upload(write_upload(FACTS, {f"t{n}": AbsHistogram(each, 0, amax, 0, 0) for n, each in enumerate(counts)}))


def announced(sent: Upload) -> AnnouncedUpload:
    return AnnouncedUpload.from_result(
        {"sha256": sent.sha256, "total": sent.total, "bytes": len(sent.content), "upload": sent.name}
    )


@pytest.fixture
def inbox(tmp_path: Path) -> UploadInbox:
    return UploadInbox(tmp_path / "uploads")


def refusal(inbox: UploadInbox, device: str, sent: Upload, number: int, payload: bytes | None = None) -> str:
    with pytest.raises(MessageError) as caught:
        inbox.receive_chunk(device, sent.name, str(number), sent.chunk(number) if payload is None else payload)
    return caught.value.code


def test_chunks_in_any_order_and_twice_are_the_file(inbox: UploadInbox) -> None:
    sent = upload()
    inbox.expect("b", announced(sent))
    for number in [*reversed(range(1, sent.total)), sent.total - 1]:
        assert not inbox.receive_chunk("b", sent.name, str(number), sent.chunk(number))
    inbox.expect("b", announced(sent))
    assert inbox.missing("b") == (sent.sha256, [0]), "what is said twice loses nothing"
    assert inbox.receive_chunk("b", sent.name, "0", sent.chunk(0))
    assert inbox.complete["b"].read_bytes() == sent.content
    assert not inbox.receive_chunk("b", sent.name, "0", sent.chunk(0)), "late, and passed over"
    assert inbox.counts["refused"] == 0


def test_a_disk_that_refuses_is_an_error_that_names_the_file(inbox: UploadInbox, tmp_path: Path) -> None:
    sent = upload()
    inbox.expect("b", announced(sent))
    inbox.receive_chunk("b", sent.name, "0", sent.chunk(0))
    (tmp_path / "uploads" / "b.part").unlink()
    with pytest.raises(AgentError, match=r"merge\.write: .*b\.part"):
        inbox.receive_chunk("b", sent.name, "1", sent.chunk(1))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(AgentError, match=r"merge\.write"):
        UploadInbox(tmp_path / "file")


def test_an_unrequested_upload_is_refused(inbox: UploadInbox) -> None:
    mine, other = upload(), upload(1)
    assert refusal(inbox, "b", mine, 0) == "histograms.unasked"
    inbox.expect("b", announced(mine))
    assert refusal(inbox, "b", other, 0) == "histograms.unasked"
    assert refusal(inbox, "c", mine, 0) == "histograms.unasked"
    assert refusal(inbox, "b", mine, 0, b"garbage") == "histograms.chunk"
    assert inbox.counts == {"refused": 4}
    assert inbox.missing("b") is None


def test_another_upload_of_the_board_takes_the_place_of_what_came_before(inbox: UploadInbox) -> None:
    first, second = upload(), upload(1)
    inbox.expect("b", announced(first))
    inbox.receive_chunk("b", first.name, "0", first.chunk(0))
    inbox.expect("b", announced(second))
    assert inbox.missing("b") is None
    for number in range(second.total):
        inbox.receive_chunk("b", second.name, str(number), second.chunk(number))
    assert inbox.complete["b"].read_bytes() == second.content


def test_a_device_called_like_a_folder_writes_nowhere_else(inbox: UploadInbox, tmp_path: Path) -> None:
    sent = upload()
    for device in ("..", ".", "a b", "ö" * 32):
        inbox.expect(device, announced(sent))
        for number in range(sent.total):
            inbox.receive_chunk(device, sent.name, str(number), sent.chunk(number))
    assert {path.parent for path in inbox.complete.values()} == {tmp_path / "uploads"}
    assert len(set(inbox.complete.values())) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["uploads"]


def test_a_foreign_upload_is_kept_apart_and_counted(
    inbox: UploadInbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_inbox, "_MOST_QUARANTINED", 2)
    garbage = Upload(b"garbage of the right hash")
    forged = upload()
    for device in ("a", "b", "c"):
        inbox.expect(device, announced(garbage))
        assert refusal(inbox, device, garbage, 0) == "histograms.unreadable"
    inbox.expect("d", announced(forged))
    for number in range(forged.total - 1):
        inbox.receive_chunk("d", forged.name, str(number), forged.chunk(number))
    payload = forged.chunk(forged.total - 1)
    assert refusal(inbox, "d", forged, forged.total - 1, payload[:-1] + bytes([payload[-1] ^ 1])) == "histograms.sha256"
    assert inbox.counts["quarantined"] == 4
    assert len(list((tmp_path / "uploads" / "quarantine").iterdir())) == 2
    assert not inbox.complete
    inbox.expect("d", announced(forged))
    assert inbox.missing("d") is None, "asked for anew"


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "x" * 64},
        {"total": 10**9},
        {"total": 1.0},
        {"bytes": 0},
        {"bytes": MAX_UPLOAD_BYTES + 1, "total": 513},
        {"bytes": True},
    ],
)
def test_an_announcement_that_no_board_would_make_is_refused(changes: dict[str, JsonValue]) -> None:
    sound: dict[str, JsonValue] = {"sha256": "0" * 64, "total": 1, "bytes": 1}
    assert AnnouncedUpload.from_result(sound).total == 1
    with pytest.raises(MessageError, match=r"histograms\.announced"):
        AnnouncedUpload.from_result({**sound, **changes})
