"""What may run on a board: models of which a holder of a release key has said so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.authority import Authority
from agent.errors import AgentError, CommandError
from agent.requests import ModelArgs, Release
from agent.state_file import StateFile
from agent.wire import problems

_SCHEMA = 1


class Releases:
    """Remembers the version that was taken up last, in the file at `path`: an older one, validly signed once, is not a
    way back to its faults. on_error hears of a disk that refuses. Raises AgentError (`releases.schema`)."""

    def __init__(self, authority: Authority | None, path: Path) -> None:
        self._authority = authority
        self._refusals: list[AgentError] = []
        self._file = StateFile(path, _SCHEMA, "releases.write", self._refusals.append)
        self._version, self._key = self._file.read(lambda d: (int(d["version"]), str(d["key"]))) or (0, "")

    def check(self, args: ModelArgs, now: float) -> tuple[Release, str] | None:
        """The release that allows this model, and the id of its key; None where no keys are asked for.

        now: Unix time in seconds. Raises CommandError: `command.release` for one that is missing, of another model, by
        another key or expired, `command.rollback` for one of a lower version than that taken up before.
        """
        if self._authority is None or not self._authority.guarded:
            return None
        key = self._authority.releases.signer(args.release) if args.release is not None else None
        if args.release is None or key is None:
            found = "no release" if args.release is None else "a release with another signature"
            expected = "one signed by a release key that this board knows, of which an operator's is none"
            raise CommandError("command.release", found, expected, "make one with 'tared release'")
        release = _read(args.release)
        if (release.sha256, release.size) != (args.sha256, args.size):
            found = f"the release of {release.sha256[:12]}, {release.size} bytes"
            raise CommandError("command.release", found, f"of {args.sha256[:12]}, {args.size} bytes", "send its own")
        if not release.issued <= release.expires or now >= release.expires:
            found = f"a release that expired {now - release.expires:.0f} s ago"
            raise CommandError("command.release", found, "one that is valid", "sign it anew with 'tared release'")
        if self._key in self._authority.releases.ids and release.version < self._version:
            found, expected = f"version {release.version}", f"at least {self._version}, which was taken up before"
            raise CommandError("command.rollback", found, expected, "release it anew under a higher version")
        return release, key

    def take_up(self, release: Release, key: str) -> None:
        """Before it is put in its place. Raises AgentError (`releases.write`)."""
        self._file.write({"version": release.version, "key": key, "sha256": release.sha256})
        if self._refusals:
            raise self._refusals[-1]
        self._version, self._key = release.version, key


def _read(document: Mapping[str, Any]) -> Release:
    try:
        return Release.model_validate(document)
    except ValidationError as error:
        raise CommandError("command.release", problems(error), "a release statement", "make a new one") from None
