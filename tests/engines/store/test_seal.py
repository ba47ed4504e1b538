"""Seals and signatures: what was changed, resealed, swapped or signed by another is refused."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from artefact_bench import ENGINE, KEY, fill, reseal
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import EngineError
from engines.store.artefact import check_runtime, fingerprint, read_artefact, write_artefact
from engines.store.signing import MANIFEST, canonical, is_signed, read_manifest, seal, sign

OTHER_KEY = b"sixteen bytes no"
INPUTS = {"model": "abc", "precision": "int8", "backend": {"runtime": "tensorrt", "version": "10.3.0"}}
MANIFEST_BODY: dict[str, Any] = {
    "schema": 1,
    "id": "0123456789abcdef",
    "inputs": INPUTS,
    "files": {"engine.plan": "ab" * 32, "plan.json": "cd" * 32},
    "engine": "engine.plan",
    "latency_ms": {"p50": 1.5},
    "verification_only": False,
}
BARE = {**MANIFEST_BODY, "files": {}, "engine": None}  # of an artefact that has no file
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a document that is no container."""
    if not isinstance(value, dict):
        return [path]
    return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, name))]


def changed_at(document: Mapping[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(dict(document))
    holder = changed
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    return changed


@pytest.fixture(name="artefact")
def signed_artefact(tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "a", INPUTS, fill, KEY).path


@pytest.mark.parametrize("key", [KEY, None])
def test_ids_seals_and_signatures_are_those_of_0_2_0(key: bytes | None) -> None:
    """With others, boards would take the engines of 0.2.0 for damaged, or for those of other inputs."""
    document: dict[str, Any] = {"scale": 0.1, "model": "abc", "backend": {"gpu": None}}

    def spelled(**more: str) -> bytes:
        return (json.dumps({**document, **more}, sort_keys=True, indent=1) + "\n").encode()

    assert fingerprint(document) == hashlib.sha256(spelled()).hexdigest()[:16]
    more = {}
    if key is not None:
        more["signature"] = hmac.new(key, b"artefact manifest\n" + spelled(), "sha256").hexdigest()
    assert seal(document, key) == spelled(**more, seal=hashlib.sha256(spelled(**more)).hexdigest())


@pytest.mark.parametrize("signature", [None, "", "ü" * 64, "\ud800", 7, [], {}, "0" * 64, KEY.hex()])
def test_a_value_that_is_no_signature_is_refused(artefact: Path, signature: object) -> None:
    reseal(artefact, signature=signature)
    with pytest.raises(EngineError, match=r"artefact\.signature"):
        read_artefact(artefact, KEY)
    assert read_artefact(artefact).read_engine() == ENGINE


@pytest.mark.parametrize("key", [KEY, None])
def test_a_flipped_bit_of_any_byte_of_a_manifest_is_found(artefact: Path, key: bytes | None) -> None:
    """In each byte, the bit that makes a small letter a capital."""
    file = artefact / MANIFEST
    whole = file.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << 5
        file.write_bytes(flipped)
        with pytest.raises(EngineError, match=r"artefact\.damaged: .*/manifest\.json is not what was written"):
            read_manifest(artefact, key)


@settings(max_examples=30)
@given(leaf=st.sampled_from(leaves(MANIFEST_BODY)), value=JSON)
def test_any_field_changed_and_resealed_is_refused_with_a_key(leaf: tuple[str, ...], value: Any) -> None:
    changed = changed_at(MANIFEST_BODY, leaf, value)
    same = canonical(changed) == canonical(MANIFEST_BODY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / MANIFEST).write_bytes(seal(MANIFEST_BODY, KEY))
        reseal(folder, **changed)
        if same:
            assert read_manifest(folder, KEY) == MANIFEST_BODY
            return
        # The schema is looked at first: a newer tared may sign otherwise. What is none is damage.
        codes = {"schema": {"artefact.schema", "artefact.damaged", "artefact.signature"}}
        with pytest.raises(EngineError) as refusal:
            read_manifest(folder, KEY)
        assert refusal.value.code in codes.get(leaf[0], {"artefact.signature"})


@settings(max_examples=30)
@given(leaf=st.sampled_from([(name,) for name in BARE] + leaves(BARE)), value=JSON)
def test_no_resealed_manifest_crashes_its_reader(leaf: tuple[str, ...], value: Any) -> None:
    changed = changed_at(BARE, leaf, value)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / MANIFEST).write_bytes(seal(changed, None))
        try:
            artefact = read_artefact(Path(name))
        except EngineError:
            return
        assert artefact.manifest == changed
        with pytest.raises(EngineError, match=r"artefact\.damaged"):
            artefact.read_engine()
        with pytest.raises(EngineError, match=r"artefact\.(runtime|verification)"):
            check_runtime(artefact, {"runtime": "none"})


@pytest.mark.parametrize(
    "written",
    [b"", b"{}", b"[]", b"null", b"7", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 100_000, b'{"seal": NaN}'],
    ids=["empty", "object", "list", "null", "number", "utf-16", "cut", "deep lists", "deep objects", "nan"],
)
@pytest.mark.parametrize("key", [KEY, None])
def test_a_file_that_is_no_manifest_is_damaged(tmp_path: Path, written: bytes, key: bytes | None) -> None:
    (tmp_path / MANIFEST).write_bytes(written)
    with pytest.raises(EngineError, match=r"artefact\.damaged"):
        read_manifest(tmp_path, key)


def test_another_spelling_of_a_manifest_is_damaged(artefact: Path) -> None:
    document = json.loads((artefact / MANIFEST).read_bytes())
    (artefact / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(EngineError, match=r"artefact\.damaged"):
        read_artefact(artefact, KEY)


def test_a_manifest_that_is_no_file_is_refused_at_once(artefact: Path) -> None:
    manifest = artefact / MANIFEST
    elsewhere = manifest.rename(artefact.parent / "elsewhere.json")
    for place in (os.mkfifo, os.mkdir, lambda path: os.symlink(elsewhere, path), lambda path: os.symlink(path, path)):
        place(manifest)
        with pytest.raises(EngineError, match=r"artefact\.unreadable: .*/manifest\.json: "):
            read_artefact(artefact, KEY)
        if manifest.is_dir():
            manifest.rmdir()
        else:
            manifest.unlink()


def test_a_signature_for_one_purpose_is_none_for_another() -> None:
    signature = sign(KEY, "kernel timings", b"content")
    assert is_signed(KEY, "kernel timings", b"content", signature)
    assert not is_signed(KEY, "artefact manifest", b"content", signature)
    assert not is_signed(KEY, "kernel timings", b"content ", signature)
    assert not is_signed(OTHER_KEY, "kernel timings", b"content", signature)
    assert not is_signed(KEY, "kernel timings", b"content", signature.upper())
