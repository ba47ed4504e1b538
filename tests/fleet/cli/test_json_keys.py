"""In all that the commands print with --json, a key has one type, and a time is Unix seconds."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import yaml
from bench import Bench, picture
from label_bench import LabelBench
from plan_bench import Place
from stored import Reports

from agent.cli.benchmark import Entry
from agent.cli.main import make_parser
from agent.common.latency import LoopSample
from agent.contract import commands, messages
from agent.contract.messages import Birth, Document, Status
from agent.control.summary import Alarm, CameraSummary, Rollback, RunSummary, Score, Swap
from agent.jobs.ledger import JobSummary
from agent.monitoring.estimates import Estimate
from agent.vision.answer import MatchCounts
from calibrate.statistics.evidence import Interval
from fleet.cli.main import GROUPS, main
from fleet.devices.devices import Devices
from fleet.devices.reports import Report, Stream
from fleet.simulator.simulation import SimulationOutcome
from fleet.store.opening import open_store

pytestmark = pytest.mark.slow

# Objects whose keys are data: names of causes, devices, tags, engines, of what a runtime reports about itself, of what
# an operator typed.
KEYED_BY_DATA = {
    *("accuracy", "arguments", "built_for", "by_source", "cached", "cameras", "counts", "document", "dropped", "ended"),
    *("excluded", "flags", "repairs_tried", "results", "results_dropped", "silent", "states_by_wave", "tags"),
}
# What the contracts give two types.
BY_CONTRACT = {
    "class": "labels name a class by its number or its name",
    "counts": "of COCO's run-length encoding the lengths, or their text where it is compressed",
    "degraded": "in the answer to status whether; elsewhere why",
    "drift": "an object in telemetry; of a device in the fleet the word that --where compares",
    "fidelity": "of a run and in telemetry an estimate with its interval; of an engine and a device a number",
    "labels": "of a classifier a number or a name; of a detector boxes",
    "latency_ms": "p50 and p99, but of a plan the median alone",
    "outline": "COCO's: polygons, or an object with run lengths",
    "precision": "of an engine its type; of a class the share of detections that are right",
    "regimes": "in a birth their ids; in the answer to status their number, beside regime_artefacts",
    "to": "the last number of a gap; the receiver of a command",
    "value": "of a key in model.yaml, with the type of that key",
}
DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:")
# These need a broker, a terminal or time; what they print is made of the same objects.
ELSEWHERE = {
    *("run", "init", "send", "watch", "web", "benchmark", "plan", "fleet collect", "fleet merge", "fleet simulate"),
    *("fleet rollout run", "fleet rollout resume", "fleet rollout abort", "store gc", "fleet report"),
}


def typed(value: Any) -> str | None:
    """The type of a value; None of what may stand beside any type: null and an empty list."""
    if isinstance(value, list):
        kinds = sorted({kind for kind in map(typed, value) if kind is not None})
        return f"list of {' and '.join(kinds)}" if kinds else None
    names = {bool: "truth", int: "number", float: "number", str: "text", dict: "object", type(None): None}
    return names[type(value)]


def keys(value: Any, where: str, counts: bool = True) -> Iterator[tuple[str, str, str]]:
    """Yield key, type and place of all below a value. counts: False if the keys of this object are data."""
    if isinstance(value, list):
        for each in value:
            yield from keys(each, where, counts)
    elif isinstance(value, dict):
        for key, each in value.items():
            kind = typed(each)
            if counts and kind is not None:
                yield key, kind, f"{where}.{key}"
            yield from keys(each, f"{where}.{key}", not counts or key not in KEYED_BY_DATA)
    elif isinstance(value, str):
        assert not DATE.match(value), f"{where} is a time as text: {value}"


def schema_types(field: dict[str, Any]) -> set[str]:
    """The types that a JSON Schema allows beside null."""
    if "anyOf" in field:
        return set().union(*map(schema_types, field["anyOf"]))
    if "$ref" in field:
        return {"object"}
    if "enum" in field or "const" in field:
        return {"text"}
    names = {"integer": "number", "number": "number", "string": "text", "boolean": "truth", "object": "object"}
    if field.get("type") == "array":
        return {f"list of {kind}" for kind in schema_types(field["items"])}
    return {names[field["type"]]} if field.get("type") in names else set()


def wire_keys() -> Iterator[tuple[str, str, str]]:
    """Yield the same of all documents on the wire, which `send` and `watch` print."""
    for name, kind in [*vars(messages).items(), *vars(commands).items()]:
        if inspect.isclass(kind) and issubclass(kind, Document) and kind is not Document:
            for key, field in kind.model_json_schema()["properties"].items():
                yield from ((key, each, f"{name}.{key}") for each in schema_types(field))


def names_with_json(parser: argparse.ArgumentParser, name: str = "") -> Iterator[str]:
    for action in parser._actions:
        if "--json" in action.option_strings:
            yield name
        if isinstance(action, argparse._SubParsersAction):
            for each, below in action.choices.items():
                yield from names_with_json(below, f"{name} {each}".strip())


def of_the_board(bench: Bench, run: Callable[..., Any]) -> None:
    clip, spec, engine = bench / "clip.avi", bench / "model.yaml", bench / "new"
    run("check", spec, "--frames", clip)
    run("calibrate", spec, "--frames", clip, "-o", bench / "c.json")
    build = ["--calibration", bench / "calibration.json", "--frames", clip, "--backend", "onnxruntime"]
    run("build", spec, *build, "-o", engine)
    run("export", engine, "--to", "onnx", "-o", bench / "exported")
    run("calibrate", spec, "--frames", clip, "--from-cache", bench / "exported/model.onnx", "-o", bench / "d.json")
    run("inspect", engine)
    run("inspect", bench / "model.onnx", "-o", bench / "guessed.yaml")
    run("infer", engine, "--frames", clip)
    for number, label in enumerate("abc"):
        bench.images(f"set/{label}", picture(40 * number))
    run("evaluate", engine, "--dataset", bench / "set")
    run("report", engine, "-o", bench / "report.html")
    run("evaluate", bench / "gone", "--dataset", bench / "set", code=2)


def of_the_machine(bench: Bench, run: Callable[..., Any]) -> None:
    state = {"model": "model.yaml", "state_dir": "state", "camera": {"source": "clip.avi"}}
    model = yaml.safe_load((bench / "model.yaml").read_text())
    config = bench.write("config.yaml", {**state, "model": model})
    (bench / "state/artefacts/damaged").mkdir(parents=True)
    (bench / "new").rename(bench / "state/artefacts/new")
    (bench / "state/artefacts/damaged/manifest.json").write_text("{}")
    run("store", "list", "-c", config)
    run("store", "verify", "-c", config, code=None)
    run("config", "--check", config)
    (bench / "drawn").mkdir()
    drawn = LabelBench(bench / "drawn", "classify", 3)
    drawn.store.label_all({1: 0, 2: 1})
    run("label", "--list", "-c", drawn.config)
    run("doctor", code=None)
    run("completion", "bash")
    run("install-service", "--dry-run", "--uninstall", "--root", bench / "root")
    run("keys", "new", bench / "maker")
    release = ["--key", bench / "maker.key", "--version", 3, "--expires", 2]
    run("release", bench / "model.onnx", *release, "-o", bench / "release.json")


def of_the_fleet(bench: Bench, run: Callable[..., Any]) -> None:
    path, now = bench / "fleet.sqlite", time.time()
    fidelity = {"estimate": 0.95, "low": 0.9, "high": 1.0, "n": 50}
    camera = {"fps": 30.0, "latency_ms": {"p50": 4.0, "p99": 9.0}, "fidelity": fidelity}
    document = json.dumps({"cameras": {"a": {**camera, "drift": {"state": "calm", "gain_db": 0.2}}}})
    with open_store(path) as store, store.transaction() as transaction:
        name, devices, birth = ("default", "board"), Devices(store), Birth(agent_version="1.0", engine="0123")
        Reports(store).put(transaction, [Report(Stream(*name, 1), 1, "telemetry", now, document)], now)
        status = Status(state="online", session="s", boot_id="b", ts=now)
        devices.apply_statuses(transaction, {name: status}, now)
        devices.apply_births(transaction, {name: (birth, birth.to_json().decode())}, now)
    database = ["--db", path]
    run("fleet", "tag", "site=berlin", *database)
    run("fleet", "devices", *database)
    run("fleet", "forget", "--where", "name=board", "--dry-run", *database)
    rollout = ["fleet", "rollout"]
    identity = run(*rollout, "create", "--op", "recalibrate", "frames=16", "--window", "01:00-05:00", *database)["id"]
    run(*rollout, "pause", identity, *database)
    run(*rollout, "list", *database)
    run(*rollout, "show", identity, *database)


def made_here(plan_bench: Place) -> Iterator[tuple[str, Any]]:
    """Return the output of a run, a benchmark and a simulation, with all possible keys; a plan, and its evidence."""
    yield "plan", plan_bench.plan()
    yield "plan --show", json.loads(plan_bench.says("plan", plan_bench / "plan.json", "--show", "--json")[0])
    entry = Entry("openvino", "int8", "why not", {"p50": 1.0, "p99": 2.0}, 0.5, 0.5, 0.5, 1, 1, 1, 0.5)
    yield "benchmark", {"model": "m", "frames": 1, "threads": 1, "rows": [asdict(entry)]}
    loop, estimate = LoopSample(1, {"camera": 2}, 30.0, 1.0, 2.0), Interval(0.9, 0.8, 1.0, 5)
    accuracy, score = Estimate(estimate, 0, 0.0), Score(MatchCounts(1, 1, 1), 0.9, 1)
    yield (
        "run",
        RunSummary(
            *("id", "why", "why", "onnxruntime", "SIGTERM"),
            loop=loop,
            alarms=[Alarm(1.0, 0.5, 6.0, 30.0)],
            swaps=[Swap(1.0, "id", "alarm", 2.0, 0.9, 0.8, 0, 1.0, 2.0)],
            rollbacks=[Rollback(1.0, "id", "alarm", "probation.fidelity", 5, 1, 0)],
            fidelity=estimate,
            live_accuracy=accuracy,
            accuracy={"first light": {"the float engine": score}},
            jobs=[JobSummary("alarm", "SUCCEEDED", "")],
            results_dropped={"file": 1},
            cameras={"door": CameraSummary(loop, estimate, accuracy)},
        ).as_dict(),
    )
    yield "fleet simulate", SimulationOutcome(devices=1).as_dict()


def test_a_key_has_one_type(bench: Bench, plan_bench: Place) -> None:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    visited = set[str]()
    with_json = set(names_with_json(make_parser(GROUPS)))

    def take(key: str, kind: str, where: str) -> None:
        found[key][kind].append(where)

    def run(*arguments: object, code: int | None = 0) -> Any:
        words = [str(word) for word in arguments]
        name = next(" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in with_json)
        visited.add(name)
        exit_code = main([*words, "--json"])
        output, errors = bench.captured()
        assert exit_code == code or code is None, errors
        document = json.loads(output)
        for each in keys(document, name):
            take(*each)
        return document

    of_the_board(bench, run)
    of_the_machine(bench, run)
    of_the_fleet(bench, run)
    for name, document in made_here(plan_bench):
        for each in keys(document, name):
            take(*each)
    for each in wire_keys():
        take(*each)
    assert with_json - visited == ELSEWHERE
    twice = {
        key: {kind: places[:2] for kind, places in kinds.items()} for key, kinds in found.items() if len(kinds) > 1
    }
    assert {key: kinds for key, kinds in twice.items() if key not in BY_CONTRACT} == {}
    assert BY_CONTRACT.keys() <= twice.keys()
