"""What may run on a board: models of which a holder of a release key has said so."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.commands.authority import Authority
from agent.common.errors import AgentError, CommandError
from agent.common.state_files import StateFile
from agent.contract.commands import ModelArgs, Release
from agent.contract.wire import problems

_SCHEMA = 1


class Releases:
    """Remembers the highest version of each key that was taken up, in the file at `path`: an older one, validly signed
    once, is not a way back to its faults.

    damage: what is to be told of a file that is there and cannot be understood: then no model is taken where releases
    are asked for, for any version could be a step back. Raises AgentError (`releases.schema`).
    """

    def __init__(self, authority: Authority | None, path: Path) -> None:
        self._authority = authority
        self.damage: AgentError | None = None
        self._file = StateFile(path, _SCHEMA, "releases.write", lambda _: None)  # it is only replaced, which raises
        versions = self._file.read(_versions)
        if versions is None and authority is not None and authority.guarded and lexists(path):
            remedy = "put back what it held, or remove it if no older release than the latest can be sent"
            self.damage = AgentError("releases.damaged", str(path), "the versions that were taken up", remedy)
        self._versions = versions or {}

    def check(self, args: ModelArgs, now: float) -> tuple[Release, str] | None:
        """The release that allows this model, and the id of its key; None where no keys are asked for.

        now: Unix time in seconds. Raises CommandError: `command.release` for one that is missing, of another model or
        product, by another key or expired, `command.rollback` for one of a lower version than any that was taken up
        before by a key that is still trusted; AgentError (`releases.damaged`).
        """
        if self._authority is None or not self._authority.guarded:
            return None
        if self.damage is not None:
            raise self.damage
        key = self._authority.releases.signer(args.release) if args.release is not None else None
        if args.release is None or key is None:
            found = "no release" if args.release is None else "a release with another signature"
            expected = "one signed by a release key that this board knows, of which an operator's is none"
            raise CommandError("command.release", found, expected, "make one with 'tared release'")
        release = _read(args.release)
        if (release.sha256, release.size) != (args.sha256, args.size):
            found = f"the release of {release.sha256[:12]}, {release.size} bytes"
            raise CommandError("command.release", found, f"of {args.sha256[:12]}, {args.size} bytes", "send its own")
        if release.product != self._authority.product:
            found, expected = (
                f"a release for {'boards of ' + name if name else 'boards without a product'}"
                for name in (release.product, self._authority.product)
            )
            raise CommandError(
                "command.release", found, expected, "see commands.product, and 'tared release --product'"
            )
        if not release.issued <= release.expires or now >= release.expires:
            found = f"a release that expired {now - release.expires:.0f} s ago"
            raise CommandError("command.release", found, "one that is valid", "sign it anew with 'tared release'")
        trusted = self._authority.releases.ids
        highest = max((version for known, version in self._versions.items() if known in trusted), default=0)
        if release.version < highest:
            found, expected = f"version {release.version}", f"at least {highest}, which was taken up before"
            raise CommandError("command.rollback", found, expected, "release it anew under a higher version")
        return release, key

    def take_up(self, release: Release, key: str) -> None:
        """Before it is put in its place. Raises AgentError (`releases.write`)."""
        versions = {**self._versions, key: max(release.version, self._versions.get(key, 0))}
        self._file.replace({"version": release.version, "key": key, "sha256": release.sha256, "versions": versions})
        self._versions = versions


def _versions(document: Mapping[str, Any]) -> dict[str, int]:
    """The highest of each key; before they were kept by key there was the latest alone."""
    latest = {str(document["key"]): int(document["version"])}
    return {str(key): int(version) for key, version in document.get("versions", latest).items()}


def _read(document: Mapping[str, Any]) -> Release:
    try:
        return Release.model_validate(document)
    except ValidationError as error:
        raise CommandError("command.release", problems(error), "a release statement", "make a new one") from None
