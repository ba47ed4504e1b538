"""Whatever engines/trt calls, every supported release has: looked up in NVIDIA's own bindings."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
from places import ROOT
from trt_bindings import RELEASES, Bindings, Member, environment, installed, lacking, probe, protocols

from engines.trt import api

CROSS_ONLY = {"ComputeCapability", "CrossConfig", "CrossTensorRt"}  # tensorrt_rtx alone has them
HOMES = {"TensorRt": "", "CrossTensorRt": "", "CrossConfig": "IBuilderConfig"}  # "" is the module
SOURCES = sorted((ROOT / "engines" / "trt").glob("*.py"))
IMPORTER = "release.py"
READ_BY_NAME = {"getattr(shapes, bound)", "vars(shapes)"}  # of objects of our own
WAYS_ROUND = {"getattr", "setattr", "hasattr", "vars", "eval", "exec", "__import__", "import_module", "attrgetter"}

_OPEN = """
import json
from engines.errors import EngineError
from engines.trt.release import open_release
try:
    release = open_release()
    print(json.dumps([release.name, str(release.traits), release.has_dla]))
except EngineError as error:
    print(json.dumps([error.code, error.found]))
"""


_START = """
import json
from engines.errors import EngineError
from engines.trt.release import open_release
from engines.trt.log import messages
release, codes = open_release(), []
for factory in (release.trt.Builder, release.trt.Runtime):
    try:
        messages(release).create(factory)
    except EngineError as error:
        codes.append(error.code)
print(json.dumps(codes))
"""


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release whose bindings are there."""
    version: str = request.param
    if not installed(version).is_dir():
        message = f"no bindings of TensorRT {version}: make bindings"
        if os.environ.get("TARED_REQUIRE_BINDINGS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return version


@pytest.fixture(scope="module")
def variables(release: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with this release, under both its names."""
    folder = tmp_path_factory.mktemp("release")
    package(folder, "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n")
    return environment(release, folder / "stubs", folder)


@pytest.fixture(scope="module")
def bindings(variables: dict[str, str]) -> Bindings:
    return probe("tensorrt_bindings", variables)


def test_every_release_has_what_is_used(bindings: Bindings) -> None:
    wanted = by_class(protocols(api), crosses=False)
    assert sum(map(len, wanted.values())) > 60
    assert lacking(wanted, bindings) == []


def test_tensorrt_rtx_has_what_is_used() -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("no tensorrt_rtx: it comes for x86-64 only")
    wanted = by_class(protocols(api), crosses=True)
    assert {member.name for member in wanted["IBuilderConfig"]} >= {"set_compute_capability", "set_flag"}
    assert lacking(wanted, probe("tensorrt_rtx", os.environ)) == []


def test_missing_members_are_reported(bindings: Bindings) -> None:
    """Else the tests above would prove nothing."""
    planted = ModuleType("planted")

    class IExecutionContext(Protocol):
        profiler: Any
        warp_speed: int

        def execute_async_v3(self, stream: int, priority: int) -> bool: ...
        def execute_v4(self) -> bool: ...

    class IDebugListener(Protocol):
        def process_debug_tensor(self, address: int, dtype: Any, name: str) -> bool: ...

    class IFluxCapacitor(Protocol):
        charge: float

    class TensorRt(Protocol):
        Builder: Any
        Rebuilder: Any

    for kind in (IExecutionContext, IDebugListener, IFluxCapacitor, TensorRt):
        kind.__module__ = "planted"
        setattr(planted, kind.__name__, kind)
    found = lacking(by_class(protocols(planted), crosses=False), bindings)
    assert [problem.partition(":")[0] for problem in found] == [
        "IExecutionContext.warp_speed",
        "IExecutionContext.execute_async_v3 with 2 arguments",
        "IExecutionContext.execute_v4",
        "IDebugListener.process_debug_tensor with 3 arguments",
        "IFluxCapacitor",
        "Rebuilder",
    ]


def test_callbacks_take_what_the_bindings_hand_them(bindings: Bindings) -> None:
    """`lacking` compares numbers of arguments only where the bindings document them; for these they do."""
    found = bindings.classes
    for name in ("ILogger", "IProgressMonitor", "IDebugListener", "IProfiler"):
        for member in protocols(api)[name]:
            assert member.positional, f"{name}.{member.name}"
            assert found[name][member.name].startswith(f"{member.name}(self: ")


def test_the_release_of_true_bindings(release: str, variables: dict[str, str], tmp_path: Path) -> None:
    major = release.partition(".")[0]
    known = open_in_a_process(variables)
    assert known == [f"tensorrt {release}", f"tensorrt {major}.x", release == "10.3.0"]
    code, found = open_in_a_process({**variables, "LD_LIBRARY_PATH": str(tmp_path)})
    assert code == "backend.library"
    assert f".so.{major}: cannot open shared object file" in found


def test_bindings_for_which_cuda_does_not_start(variables: dict[str, str]) -> None:
    """The stub's null pointer is what TensorRT gives where the driver is too old for it."""
    assert open_in_a_process(variables, _START) == ["backend.cuda", "backend.cuda"]


def test_a_release_that_is_too_old(tmp_path: Path) -> None:
    package(tmp_path, "__version__ = '8.5.2.2'\n")
    found = open_in_a_process({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found == ["backend.version", "tensorrt 8.5.2.2"]


def test_no_code_goes_round_the_protocols() -> None:
    assert len(SOURCES) > 6
    found = [f"{path.name}: {way}" for path in SOURCES for way in ways_round(path.read_text(), path.name == IMPORTER)]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import tensorrt",
        "import tensorrt_rtx as trt",
        "from tensorrt import Builder",
        "trt = importlib.import_module('tensorrt')",
        "trt = __import__('tensorrt')",
        "release.trt.__dict__['IInt8Calibrator']",
        "sys.modules['tensorrt'].IInt8Calibrator",
        "getattr(release.trt, 'IInt8Calibrator')",
        "cast(Any, config).int8_calibrator = None",
        "config: Any = builder.create_builder_config()",
        "runtime: Any = release.trt.Runtime(logger)",
    ],
)
def test_a_way_round_the_protocols_is_found(source: str) -> None:
    assert len(list(ways_round(source, imports=False))) == 1


def by_class(found: dict[str, list[Member]], crosses: bool) -> dict[str, list[Member]]:
    """The members to look up, by the name of their class in the bindings."""
    wanted: dict[str, list[Member]] = {}
    for name, members in found.items():
        if crosses or name not in CROSS_ONLY:
            wanted.setdefault(HOMES.get(name, name), []).extend(members)
    return wanted


def ways_round(source: str, imports: bool) -> Iterator[str]:
    """Expressions that would reach TensorRT past its Protocols. imports: whether this file may import it."""
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(name.startswith("tensorrt") for name in names):
                yield text
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            is_import = imports and text == "importlib.import_module(module)"
            is_cast_away = name == "cast" and ast.unparse(node.args[0]) not in protocols(api)
            if is_cast_away or (name in WAYS_ROUND and not is_import and text not in READ_BY_NAME):
                yield text
        elif isinstance(node, ast.Attribute) and (node.attr == "__dict__" or text == "sys.modules"):
            yield text
        elif isinstance(node, ast.AnnAssign) and node.value is not None and ast.unparse(node.annotation) == "Any":
            made = ast.unparse(node.value)
            if ".trt." in made or ".create_" in made or ".deserialize_" in made:
                yield text


def package(folder: Path, content: str) -> None:
    """A package `tensorrt`, as NVIDIA's own is made of its bindings."""
    (folder / "tensorrt").mkdir()
    (folder / "tensorrt" / "__init__.py").write_text(content)


def open_in_a_process(variables: dict[str, str], script: str = _OPEN) -> Sequence[Any]:
    """Return the finding or the failure of open_release, or the output of another script."""
    path = os.pathsep.join((variables["PYTHONPATH"], str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found: Sequence[Any] = json.loads(done.stdout)
    return found
