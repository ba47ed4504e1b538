"""NVIDIA's own Python bindings of TensorRT, imported without TensorRT: what do their classes have?

`tensorrt-cu12-bindings` on PyPI holds them, 1.2 MB a release. They import if libraries of empty functions replace the
libraries that they are linked against. Nothing executes; names and signatures are the true ones.

    make bindings       fetches the releases below into var/bindings, once
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from places import ROOT

RELEASES = ("10.3.0", "10.13.3.9", "11.4.0.106")  # JetPack 6, JetPack 7, JetPack 7.2.2 and later
FOLDER = ROOT / "var" / "bindings" / f"cp{sys.version_info.major}{sys.version_info.minor}"
_CALLED = re.compile(r"\b(create\w+_INTERNAL|get\w*PluginRegistry|getNvOnnxParserVersion|initLibNvInferPlugins)$", re.M)
_NEEDED = re.compile(r"\[(libnv(?:infer|onnxparser)\w*\.so\.\d+)\]")
_SIGNATURE = re.compile(r"\w+\((.*)\)(?: -> .*)?$")

_PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
found = {}
for name in dir(module):
    kind = getattr(module, name)
    if isinstance(kind, type):
        found[name] = {member: (getattr(kind, member).__doc__ or "").partition("\\n")[0] for member in dir(kind)}
print(json.dumps({"members": dir(module), "classes": found}))
"""


@dataclass(frozen=True)
class Bindings:
    """members: names in the module. classes: by name, the first line of documentation of every member."""

    members: Sequence[str]
    classes: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Member:
    """positional: the arguments that a method of a Protocol takes beside self; None for an attribute."""

    name: str
    positional: int | None


def installed(release: str) -> Path:
    """Where the bindings of a release lie, or would."""
    return FOLDER / release


def fetch(release: str) -> bool:
    """Fetch a release unless it is there; says in one line why not, where it cannot."""
    folder = installed(release)
    if (folder / "tensorrt_bindings").is_dir():
        return True
    partial = folder.with_name(f"{release}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries=1"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(partial)]
    done = subprocess.run([*install, f"tensorrt-cu12-bindings=={release}"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        print(f"no bindings of TensorRT {release}, so their test is skipped: {reason}")
        return False
    partial.replace(folder)
    return True


def environment(release: str, stubs: Path, *more: Path) -> dict[str, str]:
    """The environment of a process that imports the bindings of a release; makes the libraries it needs in `stubs`.

    Raises RuntimeError without gcc and binutils.
    """
    _build_stubs(installed(release) / "tensorrt_bindings" / "tensorrt.so", stubs)
    path = os.pathsep.join(map(str, (installed(release), *more)))
    return {**os.environ, "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": path}


def probe(module: str, variables: Mapping[str, str]) -> Bindings:
    """Return the members of a module, read in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, module], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Bindings(**json.loads(done.stdout))


def protocols(module: ModuleType) -> dict[str, list[Member]]:
    """Every Protocol that a module defines, with its own members; no dunder names."""
    found: dict[str, list[Member]] = {}
    for name, kind in vars(module).items():
        if isinstance(kind, type) and getattr(kind, "_is_protocol", False) and kind.__module__ == module.__name__:
            attributes = [Member(each, None) for each in inspect.get_annotations(kind)]
            methods = [Member(n, _arity(f)) for n, f in vars(kind).items() if inspect.isfunction(f)]
            found[name] = [member for member in (*attributes, *methods) if not member.name.startswith("_")]
    return found


def lacking(wanted: Mapping[str, Sequence[Member]], found: Bindings) -> list[str]:
    """Return the members that the bindings lack, as "Class.member", and methods that take another number of arguments.

    wanted: Protocols by the name of their class; "" is the module itself.
    """
    problems = []
    for name, members in wanted.items():
        if name and name not in found.classes:
            problems.append(name)
            continue
        for member in members:
            there = member.name in (found.classes[name] if name else found.members)
            documented = found.classes[name].get(member.name, "") if name else ""
            if not there:
                problems.append(f"{name}.{member.name}".lstrip("."))
            elif member.positional is not None and not _fits(member.positional, documented):
                problems.append(f"{name}.{member.name} with {member.positional} arguments: {documented}")
    return problems


def _arity(function: Any) -> int:
    return len(inspect.signature(function).parameters) - 1


def _fits(positional: int, documented: str) -> bool:
    """Whether a call with so many arguments fits pybind's line of documentation; of overloads it says nothing."""
    match = _SIGNATURE.match(documented)
    if match is None or "*args" in documented:
        return True
    parameters = _split(match[1])[1:]
    return sum("=" not in parameter for parameter in parameters) <= positional <= len(parameters)


def _split(parameters: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in parameters:
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _build_stubs(extension: Path, folder: Path) -> None:
    """Libraries of the names that the extension module is linked against, with whatever it calls of them."""
    if not all(map(shutil.which, ("gcc", "nm", "readelf"))):
        raise RuntimeError("no gcc and binutils (Debian: build-essential)")
    called = _CALLED.findall(_output("nm", "-D", "--undefined-only", str(extension)))
    folder.mkdir(parents=True, exist_ok=True)
    source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in called)
    for name in _NEEDED.findall(_output("readelf", "-d", str(extension))):
        link = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), "-x", "c", "-"]
        subprocess.run(link, input=source, text=True, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("TensorRT's bindings come for x86-64 Linux only; their tests are skipped")
        return
    for release in RELEASES:
        if not fetch(release):
            return


if __name__ == "__main__":
    main()
