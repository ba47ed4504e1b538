"""Decide which models may run on a board: those with a statement signed by a release key."""

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
from agent.contract.wire import describe_errors

_SCHEMA = 1


class Releases:
    """Check releases, and remember the highest installed version of each key in the file at `path`.

    So an older release, validly signed once, is not a way back to its faults.

    damage: the error of a file that exists and cannot be read. No model is accepted then if releases are required,
    since any version could be a step back.
    """

    def __init__(self, authority: Authority | None, path: Path) -> None:
        """authority: None requires no release. Raises AgentError (`releases.schema`) for the file of a newer tared."""
        self._authority = authority
        self.damage: AgentError | None = None
        self._file = StateFile(path, _SCHEMA, "releases.write", lambda _: None)  # only `replace` is used, which raises
        versions = self._file.read(_versions)
        if versions is None and authority is not None and authority.has_keys and lexists(path):
            remedy = "put back what it held, or remove it if no older release than the latest can be sent"
            self.damage = AgentError("releases.damaged", str(path), "the versions that were taken up", remedy)
        self._versions = versions or {}

    def check(self, args: ModelArgs, now: float) -> tuple[Release, str] | None:
        """Return the release that allows this model, and the id of its key; None if no release is required.

        now: Unix time in seconds.

        Raises CommandError:
            command.release     no release, or one of another model or product, by another key, or expired
            command.rollback    a lower version than one installed before, by a key that is still trusted
        Raises AgentError: `releases.damaged`.
        """
        if self._authority is None or not self._authority.has_keys:
            return None
        if self.damage is not None:
            raise self.damage
        key = self._authority.releases.signer_id(args.release) if args.release is not None else None
        if args.release is None or key is None:
            found = "no release" if args.release is None else "a release with another signature"
            expected = "one signed by a release key that this board knows, of which an operator's is none"
            raise CommandError("command.release", found, expected, "make one with 'tared release'")
        try:
            release = Release.model_validate(args.release)
        except ValidationError as error:
            found = describe_errors(error)
            raise CommandError("command.release", found, "a release statement", "make a new one") from None
        if (release.sha256, release.size) != (args.sha256, args.size):
            found = f"the release of {release.sha256[:12]}, {release.size} bytes"
            raise CommandError("command.release", found, f"of {args.sha256[:12]}, {args.size} bytes", "send its own")
        if release.product != self._authority.product:
            found, expected = (
                f"a release for {'boards of ' + name if name else 'boards without a product'}"
                for name in (release.product, self._authority.product)
            )
            remedy = "see commands.product, and 'tared release --product'"
            raise CommandError("command.release", found, expected, remedy)
        if not release.issued <= release.expires or now >= release.expires:
            found = f"a release that expired {now - release.expires:.0f} s ago"
            raise CommandError("command.release", found, "one that is valid", "sign it anew with 'tared release'")
        trusted = self._authority.releases.ids
        highest = max((version for known, version in self._versions.items() if known in trusted), default=0)
        if release.version < highest:
            found, expected = f"version {release.version}", f"at least {highest}, which was taken up before"
            raise CommandError("command.rollback", found, expected, "release it anew under a higher version")
        return release, key

    def record(self, release: Release, key: str) -> None:
        """Record the release before its model is installed. Raises AgentError (`releases.write`)."""
        versions = {**self._versions, key: max(release.version, self._versions.get(key, 0))}
        self._file.replace({"version": release.version, "key": key, "sha256": release.sha256, "versions": versions})
        self._versions = versions


def _versions(document: Mapping[str, Any]) -> dict[str, int]:
    """Return the highest version of each key. Older files hold only the latest version and its key."""
    latest = {str(document["key"]): int(document["version"])}
    return {str(key): int(version) for key, version in document.get("versions", latest).items()}
