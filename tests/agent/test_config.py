"""config.yaml: the reference and the schemas have every key with its true default; all errors at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # its stubs are not installed
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from worlds import SPEC

from agent.cli.configuration import config_schema, model_example, model_schema
from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.config import REMOVED_KEYS, Config, load_config
from agent.mqtt.endpoint import TlsFiles
from agent.vision.registry import TASKS, task_class
from fleet.cli.main import main

REFERENCE = (ROOT / "config.yaml").read_text(encoding="utf-8")
SCHEMAS = {"config": config_schema(REFERENCE), "model": model_schema(REFERENCE)}


def keys(content: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key with its value, but those of the sections."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from keys(value, (*path, name))
        else:
            yield (*path, name), value


def properties(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every key of a schema that holds a value, by its path."""
    for name, each in node["properties"].items():
        reference = next((one["$ref"] for one in (each, *each.get("anyOf", ())) if "$ref" in one), None)
        inner = schema["$defs"][reference.rpartition("/")[2]] if reference else {}
        if "properties" in inner and name not in ("model", "tls"):
            yield from (((name, *path), leaf) for path, leaf in properties(schema, inner))
        else:
            yield (name,), each


# ---- the reference, and the schemas


def test_every_value_of_the_reference_is_the_default_of_the_schema() -> None:
    leaves = dict(properties(SCHEMAS["config"], SCHEMAS["config"]))
    shown = dict(keys(yaml.safe_load(REFERENCE)))
    assert shown.keys() == leaves.keys()
    required = {path for path, each in leaves.items() if "default" not in each}
    assert required == {("model",), ("camera", "source")}
    assert {path: value for path, value in shown.items() if path not in required} == {
        path: each["default"] for path, each in leaves.items() if path not in required
    }
    assert [path for path, each in leaves.items() if not each.get("description")] == []


def test_the_accepted_loss_is_that_of_the_task_unless_a_number_is_configured() -> None:
    camera = {"source": "v4l2:/dev/video0"}
    found = set()
    for task in ("classify", "segment", "depth", "raw"):
        content = {"model": {"path": "m.onnx", "task": task}, "camera": camera}
        assert Config.model_validate(content).max_loss == task_class(task).max_loss
        assert Config.model_validate({**content, "recalibration": {"max_loss": 0.0}}).max_loss == 0.0
        found.add(Config.model_validate(content).max_loss)
    assert len(found) > 1


def test_losses_that_tasks_accept_are_shares_and_those_of_old_tasks_stay() -> None:
    found = {name: (task_class(name).max_loss, task_class(name).certified_loss) for name in TASKS}
    assert all(0.0 < certified <= accepted < 1.0 for accepted, certified in found.values())
    assert {name: found[name] for name in ("classify", "detect")} == {"classify": (0.1, 0.02), "detect": (0.1, 0.02)}


def test_every_key_of_a_model_is_described_with_its_true_default() -> None:
    content = yaml.safe_load(model_example(REFERENCE))
    leaves = dict(properties(SCHEMAS["model"], SCHEMAS["model"]))
    examples = {("path",), ("task",), ("decoder",), ("profiles",), ("labels",)}
    assert {path[0] for path, _ in keys(content)} == {path[0] for path in leaves}
    for path, value in keys(content):
        if path not in examples:
            assert leaves[path]["default"] == value, path
    silent = {path for path, each in leaves.items() if not each.get("description")}
    assert silent <= {("path",), ("input", "scale")}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_that_editors_read_are_those_of_this_code(name: str) -> None:
    kept = (ROOT / f"docs/schemas/{name}.schema.json").read_text(encoding="utf-8")
    assert json.loads(kept) == SCHEMAS[name], "run 'make generated'"
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("config", "config.yaml"),
        ("config", "examples/street/config.yaml"),
        ("config", "systemd/config.yaml"),
        ("model", "examples/street/model.yaml"),
        *(("model", f"examples/street/{path.name}") for path in (ROOT / "examples/street").glob("street-*.yaml")),
    ],
)
def test_an_editor_accepts_the_files_of_the_project(name: str, path: str) -> None:
    content = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(content)


@pytest.mark.parametrize(
    "change", [{"thread": 2}, {"threads": 0}, {"mqtt": {"port": "x"}}, {"backend": 1}, {"camera": {"fps": 1000}}]
)
def test_an_editor_finds_a_key_or_a_value_that_cannot_be(change: dict[str, Any]) -> None:
    content = {**yaml.safe_load(REFERENCE), **change}
    assert list(jsonschema.Draft202012Validator(SCHEMAS["config"]).iter_errors(content))
    assert list(jsonschema.Draft202012Validator(SCHEMAS["config"]).iter_errors({**content, **change}))


# ---- tared config


def test_the_command_prints_the_reference_and_the_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--example"]) == 0
    assert capsys.readouterr().out == REFERENCE
    for name in SCHEMAS:
        assert main(["config", "--schema", name]) == 0
        assert json.loads(capsys.readouterr().out) == SCHEMAS[name]


def test_a_check_reports_every_error_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "models" / "bad.yaml").write_text("path: net.onnx\ntask: guess\nscores: 1\n")
    camera = {"source": "v4l2:/dev/video9", "flip": "clockwise"}
    path = write(folder, {"model": "models/bad.yaml", "camera": camera, "threads": 0, "typo": 1})
    assert main(["config", "--check", str(path)]) == 2
    errors = capsys.readouterr().err
    assert "5 errors in " in errors
    for words in ("model: task", "model: scores: unknown key", "threads: ", "typo: unknown key", "camera 'camera': "):
        assert words in errors
    (folder / "models" / "net.onnx").write_bytes(b"")
    (folder / "clip.mp4").write_bytes(b"")
    assert main(["config", "--check", str(write(folder, MINIMAL)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["camera_names"] == ["camera"]


# ---- reading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.yaml").write_text(yaml.safe_dump({**SPEC, "path": "net.onnx"}))
    return tmp_path


def write(folder: Path, content: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def refused(path: Path) -> list[str]:
    """The lines of a ConfigError that lists errors."""
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.code == "config.invalid"
    return [line.strip() for line in caught.value.found.splitlines()[1:]]


MINIMAL: dict[str, Any] = {"model": "models/net.yaml", "camera": {"source": "clip.mp4"}}


def test_a_config_with_keys_of_an_earlier_release_is_still_valid(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    regimes, headroom = {"fidelity": 0.5, "most": 3}, {"temperature_limit_c": None}
    content = {
        "model": str(ROOT / "examples/street/model.yaml"),
        "camera": {"source": "rtsp://camera"},
        "regimes": regimes,
        "recalibration": {"headroom": headroom},
    }
    path = write(folder, content)
    assert load_config(path).regimes.most == 3
    assert [record.getMessage().split()[1] for record in caplog.records] == [
        f"ignored_key={key}" for key in REMOVED_KEYS
    ]
    caplog.clear()
    assert main(["config", "--check", str(path)]) == 0
    assert "is valid" in capsys.readouterr().out
    assert len(caplog.records) == len(REMOVED_KEYS)
    write(folder, {**content, "regimes": {"fidelity": 0.5, "faithful": 0.5}})
    with pytest.raises(ConfigError, match=r"1 error .*\n  regimes\.faithful: unknown key"):
        load_config(path)


def test_relative_paths_are_relative_to_the_file_that_names_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {
        **MINIMAL,
        "state_dir": "state",
        "camera": {"source": "clip.mp4", "labels": "clip.jsonl"},
        "mqtt": {"password_file": "secret", "tls": {"ca_file": "ca.pem", "cert_file": "credential:me"}},
    }
    path = write(folder, content)
    monkeypatch.chdir("/")
    for named in (path, Path(*path.parts[1:])):  # absolute, and relative to the working folder
        config = load_config(named)
        assert config.model.path == folder / "models" / "net.onnx"
        assert config.every_camera[0].source == str(folder / "clip.mp4")
        assert config.every_camera[0].labels == folder / "clip.jsonl"
        assert config.state_dir == folder / "state"
        assert config.mqtt.password_file == folder / "secret"
        assert config.mqtt.tls == TlsFiles(ca_file=folder / "ca.pem", cert_file=Path("credential:me"))


def test_absolute_paths_and_cameras_stay_as_they_are(folder: Path) -> None:
    for source in ("/videos/clip.mp4", "v4l2:/dev/video0", "csi:0", "rtsp://user@host/stream", "rtsps://host/stream"):
        content = {**MINIMAL, "state_dir": "/var/lib/tared", "camera": {"source": source}}
        config = load_config(write(folder, content))
        assert (config.every_camera[0].source, config.state_dir) == (source, Path("/var/lib/tared"))
    night = load_config(write(folder, {**MINIMAL, "camera": {"source": "22:30.mp4"}}))
    assert night.every_camera[0].source == str(folder / "22:30.mp4")


def test_a_labels_file_lies_beside_the_spec_that_names_it(folder: Path) -> None:
    (folder / "models" / "names.txt").write_text("cat\ndog\n")
    (folder / "models" / "net.yaml").write_text(yaml.safe_dump({**SPEC, "path": "net.onnx", "labels": "names.txt"}))
    assert load_config(write(folder, MINIMAL)).model.labels == ("cat", "dog")


# ---- refusing


def test_a_frame_by_itself_waits_for_no_other(folder: Path) -> None:
    """It does with `frames: 2`; a copy of config.yaml is not an error."""
    said = "batch.wait_s: expected 0 where batch.frames is 1: a frame by itself waits for no other, got 0.1"
    for alone in ({"wait_s": 0.1}, {"frames": 1, "wait_s": 0.1}):
        assert refused(write(folder, {**MINIMAL, "batch": alone})) == [said]
    for batch in ({"frames": 2, "wait_s": 0.1}, {"frames": 1, "wait_s": 0.0}):
        load_config(write(folder, {**MINIMAL, "batch": batch}))


def test_missing_required_keys_are_named(folder: Path) -> None:
    assert refused(write(folder, "log_level: info\n")) == ["model: missing", "camera: missing"]
    assert refused(write(folder, {"model": 7, "camera": {}})) == [
        "model: expected keys and values, got 7",
        "camera.source: missing",
    ]


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("camera", "speed", [-1, ".nan", ".inf", "quick"]),
        ("observe", "period_s", [0, -1, ".nan", ".inf"]),
        ("observe", "alert_period_s", [0, ".inf"]),
        ("observe", "budget", [0, 1.5, "some"]),
        ("observe", "held_out", [3, 513, 8.5]),
        ("calibration", "frames", [0, "many"]),
        ("calibration", "within_s", [0, -1, ".inf"]),
        ("calibration", "method", ["", "guess", "percentile:50", "global:0"]),
        ("drift", "tolerance_db", [0, 12, ".nan"]),
        ("drift", "block_s", [0, 1e300]),
        ("drift", "false_alarms_per_30d", [0, ".inf", 1e300]),
        ("recalibration", "max_loss", [-0.1, 1.1, ".nan"]),
        ("recalibration", "nice", [-1, 20]),
        ("recalibration", "timeout_s", [0, ".inf"]),
        ("recalibration", "cooldown_s", [-1, ".nan"]),
        ("mqtt", "port", [0, 65536, "mqtt"]),
        ("mqtt", "host", [""]),
        ("mqtt", "device", ["", "a/b", "a+b", "a#b", "x" * 65]),
        ("mqtt", "fleet", ["a/b"]),
        ("mqtt", "keepalive_s", [4, 3601]),
        ("mqtt", "password_file", ["credential:", "credential:a/b", "credential:.."]),
        ("mqtt", "websocket_path", ["mqtt", "", "/a b", "/a\r\nX: y"]),
        ("mqtt", "protocol", ["4", 4, 3.1, ""]),
        ("mqtt", "will_delay_s", [-1, 3601, 0.5]),
        ("mqtt", "telemetry_period_s", [0, ".inf"]),
    ],
)
def test_impossible_values_are_refused_by_name(folder: Path, section: str, key: str, values: list[object]) -> None:
    for value in values:
        written = yaml.safe_dump(MINIMAL | {section: {**MINIMAL.get(section, {}), key: "VALUE"}}).replace(
            "VALUE", str(value) if str(value).startswith(".") else repr(value)
        )
        (line,) = refused(write(folder, written))
        assert line.startswith(f"{section}.{key}: expected ")


@pytest.mark.parametrize(
    "sections",
    [{"recalibration": {"timeout_s": 300}}, {"calibration": {"within_s": 900}}],
    ids=["no time to collect", "too long a collection"],
)
def test_a_job_has_the_time_to_collect(folder: Path, sections: dict[str, Any]) -> None:
    (line,) = refused(write(folder, MINIMAL | sections))
    within_s = sections.get("calibration", {}).get("within_s", 300)
    assert line.startswith(f"recalibration: expected timeout_s above calibration.within_s, which is {within_s}")
    load_config(write(folder, MINIMAL | sections | {"recalibration": {"timeout_s": 901}}))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*Config.model_fields, "source", "path", "x"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_mapping_is_read_or_refused(content: object) -> None:
    if not isinstance(content, dict):
        content = {"camera": content}
    refusal = None
    try:
        validate(Config, content, "config.yaml")
    except ConfigError as error:
        refusal = error
    assert refusal is None or (refusal.code, "\n  " in refusal.found) == ("config.invalid", True)
