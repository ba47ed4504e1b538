"""The key that signs artefacts: where it is found, and what is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.errors import EngineError
from engines.store.signing import CREDENTIAL, NO_KEY, find_key

KEY = b"sixteen bytes ok"
OTHER_KEY = b"sixteen bytes no"


def write_key(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture(name="credentials")
def credentials_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the credentials folder as systemd does for a service."""
    (tmp_path / "credentials").mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


@pytest.fixture(name="outside")
def outside_of_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


@pytest.mark.usefixtures("outside")
def test_without_file_and_credential_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_key() is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "")
    assert find_key() is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert find_key() is None


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("content", "key"),
    [
        (KEY, KEY),
        (KEY + b"\n", KEY),
        (KEY + b"\n\n", KEY + b"\n"),
        (b"\x00" + KEY + b"\xff", b"\x00" + KEY + b"\xff"),
        (b" " + KEY, b" " + KEY),
    ],
)
def test_a_key_is_the_bytes_of_its_file_without_one_newline(tmp_path: Path, content: bytes, key: bytes) -> None:
    assert find_key(write_key(tmp_path / "key", content)) == key


def test_the_credential_is_the_key_unless_a_file_is_named(tmp_path: Path, credentials: Path) -> None:
    write_key(credentials / CREDENTIAL, KEY, 0o440)  # systemd's ACL for the service shows as the group's right
    assert find_key() == KEY
    assert find_key(credentials / CREDENTIAL) == KEY
    assert find_key(write_key(tmp_path / "key", OTHER_KEY)) == OTHER_KEY


def test_the_units_default_is_no_key_but_a_lost_one_is_an_error(credentials: Path) -> None:
    write_key(credentials / CREDENTIAL, NO_KEY)
    assert find_key() is None
    with pytest.raises(EngineError, match=r"artefact\.key: 4 bytes"):
        find_key(credentials / CREDENTIAL)  # named, it is asked for
    write_key(credentials / CREDENTIAL, b"")
    with pytest.raises(EngineError, match=r"artefact\.key: 0 bytes"):
        find_key()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("content", [b"", b"\n", KEY[:15], KEY[:15] + b"\n"])
def test_a_short_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = write_key(tmp_path / "key", content)
    with pytest.raises(
        EngineError, match=r"artefact\.key: \d+ bytes in .*; expected a key of at least 16 bytes .*head -c"
    ):
        find_key(file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610])
def test_a_key_that_others_may_use_is_refused_outside_of_systemds_folder(
    tmp_path: Path, credentials: Path, mode: int
) -> None:
    file = write_key(tmp_path / "key", KEY, mode)
    with pytest.raises(EngineError, match=rf"artefact\.key: .* with mode {mode:o}.*; chmod 600 {file}"):
        find_key(file)
    (credentials / CREDENTIAL).symlink_to(file)  # a link from there leads out of there
    with pytest.raises(EngineError, match=r"artefact\.key: .* with mode"):
        find_key()
    file.chmod(0o400)
    assert find_key(file) == find_key() == KEY


@pytest.mark.usefixtures("outside")
def test_a_key_file_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"artefact\.key: no .*/nowhere; .*umask 077"):
        find_key(tmp_path / "nowhere")
    with pytest.raises(EngineError, match=r"artefact\.key: .*not a regular file"):
        find_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(EngineError, match=r"artefact\.key: .*not a regular file"):
        find_key(tmp_path / "pipe")
    with pytest.raises(EngineError, match=r"artefact\.key: /dev/zero: not a regular file"):
        find_key(Path("/dev/zero"))
