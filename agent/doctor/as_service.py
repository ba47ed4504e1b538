"""The service's own configuration, looked at as the service sees it: with its state directory and its credentials."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.doctor.finding import read
from agent.installation import Service
from engines.seal import NO_KEY

_LOADED = re.compile(r"^LoadCredential=([^:\n]+):(.+)$", re.MULTILINE)


@contextmanager
def as_the_service(root: Path, service: Service) -> Iterator[None]:
    """Inside it the environment says what systemd says to the service (systemd.exec(5)).

    Of the credentials those that this user may read are there; root may read all.
    """
    with tempfile.TemporaryDirectory(prefix="tared-doctor-") as folder:
        for name, file in _LOADED.findall(read(root / service.unit_path)):
            _hand_over(root / file.lstrip("/"), Path(folder, name))
        given = {"STATE_DIRECTORY": str(root / service.state_path), "CREDENTIALS_DIRECTORY": folder}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _hand_over(file: Path, to: Path) -> None:
    """By a link, no copy of a secret; the unit's default for one that is not there."""
    if os.access(file, os.R_OK):
        to.symlink_to(file)
    elif os.access(file.parent, os.X_OK) and not file.exists():
        to.write_bytes(NO_KEY)
