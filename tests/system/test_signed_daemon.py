"""A daemon that has a key serves what it has signed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import FIRST_COMMIT, World

from engines.store.artefact import Store
from engines.store.signing import CREDENTIAL

KEY = bytes(range(32))


@pytest.mark.slow
def test_an_unsigned_engine_is_replaced_and_a_signed_one_served(
    calibrated_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = calibrated_world
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / CREDENTIAL).write_bytes(KEY)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    signed, said = world.run(until=FIRST_COMMIT)
    assert "artefact.signature" in said
    assert [swap["trigger"] for swap in signed["swaps"]] == ["first-start"]
    assert KEY.hex() not in said
    again, said = world.run("--frames", "20")
    assert "artefact.signature" not in said
    assert again["swaps"] == []
    assert again["artefact"] == signed["artefact"]
    current = Store(world.state_dir, KEY).read("current")
    assert current is not None
    assert str(current.path) == signed["artefact"]
