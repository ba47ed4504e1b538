"""Signatures over canonical JSON: what they cover, and what no spelling can change."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agent.common.errors import ConfigError
from agent.contract.signing import Keyring, Signer, canonical, new_key
from agent.contract.wire import read_object


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(new_key(tmp_path / "ann")[0])


@pytest.fixture
def keyring(tmp_path: Path, signer: Signer) -> Keyring:  # noqa: ARG001  it makes the key
    return Keyring([tmp_path / "ann.pub"])


# RFC 8785, 3.2.2: its sample, with the output of 3.2.3.
SAMPLE = r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
 "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
CANONICAL_SAMPLE = bytes.fromhex(
    "7b226c69746572616c73223a5b6e756c6c2c747275652c66616c73655d2c226e756d62657273223a5b3333333333333333332e33333333333"
    "3332c31652b33302c342e352c302e3030322c31652d32375d2c22737472696e67223a22e282ac245c75303030665c6e4127425c225c5c5c5c"
    "5c222f227d"
)
# RFC 8785, 3.2.3: the order of keys by UTF-16 code units, in which the grinning face comes before U+FB33.
KEYS = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


def test_the_canonical_form_is_that_of_the_rfc() -> None:
    assert canonical(json.loads(SAMPLE)) == CANONICAL_SAMPLE
    assert list(json.loads(canonical(dict.fromkeys(reversed(KEYS), 0)))) == KEYS


@pytest.mark.parametrize(
    ("signed", "sent", "is_same"),
    [
        (b'"n": 100', b'"n": 1e2', True),
        (b'"n": 100', b'"n": 100.0', True),
        (b'"a": "\\u00e9"', b'"a": "\xc3\xa9"', True),
        (b'{"n": 100, "a": "\\u00e9"', b'{ "a": "\\u00e9", "n": 100', True),
        (b'"n": 100', b'"n": 101', False),
        (b'"n": 100', b'"n": "100"', False),
        (b'"n": 100', b'"n": 1e23', False),
        (b'"n": 100', b'"n": 9007199254740993', False),  # no double holds it: nobody can tell what was signed
        (b'"n": 100', b'"n": 100, "m": null', False),
        (b'"a": "\\u00e9"', b'"a": "e\xcc\x81"', False),  # looks the same: RFC 8785 does not normalise
    ],
)
def test_a_signature_covers_the_values_and_not_their_spelling(
    signer: Signer, keyring: Keyring, signed: bytes, sent: bytes, is_same: bool
) -> None:
    payload = json.dumps(signer.sign({"n": 100, "a": "\u00e9"})).encode()
    other = payload.replace(signed, sent)
    assert other != payload
    assert keyring.signer_id(read_object(other)) in (keyring.ids if is_same else {None})


@pytest.mark.parametrize(
    "signature", [None, 7, "", "AAAA", "\u00e9", "=" * 88, base64.b64encode(bytes(64)).decode(), []]
)
def test_a_malformed_signature_is_none(keyring: Keyring, signature: object) -> None:
    assert keyring.signer_id({"op": "status", "signature": signature}) is None


def test_a_private_key_is_for_its_owner_alone_and_never_written_over(tmp_path: Path) -> None:
    private, public, identity = new_key(tmp_path / "ann")
    assert (private.name, public.name) == ("ann.key", "ann.pub")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert Keyring([public]).ids == {identity}
    before = private.read_bytes()
    with pytest.raises(ConfigError, match=r"key\.exists"):
        new_key(tmp_path / "ann")
    assert private.read_bytes() == before
    private.chmod(0o640)
    with pytest.raises(ConfigError, match=r"key\.mode.*640.*chmod 600"):
        Signer(private)


def test_a_public_key_cannot_sign_and_a_private_one_is_none_to_check_with(tmp_path: Path) -> None:
    private, public, _ = new_key(tmp_path / "ann")
    public.chmod(0o600)
    with pytest.raises(ConfigError, match=r"key\.unreadable"):
        Signer(public)
    with pytest.raises(ConfigError, match=r"key\.unreadable"):
        Keyring([private])
    with pytest.raises(ConfigError, match=r"key\.unreadable.*No such file"):
        Keyring([tmp_path / "nobody.pub"])


def test_a_file_may_hold_several_keys_and_each_counts(tmp_path: Path) -> None:
    """As the one file that systemd hands over as a credential."""
    made = [new_key(tmp_path / name) for name in ("ann", "bob")]
    both = tmp_path / "operator-keys"
    both.write_bytes(b"Ann and Bob\n" + b"\n# and\n".join(public.read_bytes() for _, public, _ in made))
    keyring = Keyring([both])
    assert keyring.ids == {identity for _, _, identity in made}
    assert [keyring.signer_id(Signer(private).sign({"a": 1})) for private, _, _ in made] == [each[2] for each in made]
    both.write_bytes(both.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"key\.unreadable"):
        Keyring([both])


def test_keys_are_those_of_openssl(tmp_path: Path) -> None:
    private, public, _ = new_key(tmp_path / "ann")
    shown = subprocess.run(["openssl", "pkey", "-in", private, "-pubout"], check=True, capture_output=True)
    assert shown.stdout == public.read_bytes()
    theirs = tmp_path / "theirs.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "rsa", "-out", theirs], check=True, capture_output=True)
    theirs.chmod(0o600)
    with pytest.raises(ConfigError, match="another kind"):
        Signer(theirs)


def test_without_keys_neither_the_daemon_nor_the_pages_import_cryptography() -> None:
    """7 MiB of a board's memory."""
    source = (
        "import sys, agent.daemon.run, fleet.web.server; from agent.contract.signing import Keyring\n"
        "assert Keyring().signer_id({'signature': 'AAAA'}) is None; assert 'cryptography' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
