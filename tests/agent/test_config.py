"""config.yaml: every key documented with its true default, paths relative to the file, all errors at once."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from pydantic.fields import FieldInfo
from worlds import SPEC

from agent.camera.config import CameraConfig
from agent.common.errors import ConfigError
from agent.common.schema import Strict, validate
from agent.config import Config, MqttConfig, load_config
from agent.mqtt.endpoint import TlsFiles
from agent.vision.spec import ModelSpec

LEFT_OUT = re.compile(r"left out: ([^#\n]+)", re.IGNORECASE)


def nested(field: FieldInfo) -> type[Strict] | None:
    if CameraConfig in get_args(field.annotation) and field.default is None:
        return CameraConfig  # which the file has, though `cameras` may stand in its place
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Strict) else None


def leaves(schema: type[Strict], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every key of a schema that holds a value, by its path; a model spec is one value, documented by itself."""
    for name, field in schema.model_fields.items():
        inner = nested(field)
        if inner is None or inner is ModelSpec:
            yield (*path, name), field
        else:
            yield from leaves(inner, (*path, name))


def at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        assert name in document, f"{'.'.join(path)} is not documented in config.yaml"
        document = document[name]
    return document


def comments(text: str) -> dict[tuple[str, ...], str]:
    """What stands above each key (or above the keys right before it), and behind it."""
    found: dict[tuple[str, ...], str] = {}
    path: list[tuple[int, str]] = []
    above, after_key = "", False
    for line in text.splitlines():
        key = re.match(r"( *)(\w+):(.*)", line)
        if key:
            depth = len(key[1])
            path = [(level, name) for level, name in path if level < depth] + [(depth, key[2])]
            behind = key[3].partition("#")[2]
            found[tuple(name for _, name in path)] = f"{above} {behind}".strip()
        elif re.match(r" *# ?\S", line):  # further in stands an example
            above = "" if after_key else above
            above += " " + line.strip(" #")
        elif not line.strip():
            above = ""
        after_key = key is not None
    return found


def check_documented(schema: type[Strict], text: str, content: Mapping[str, Any], shown: Strict) -> None:
    said = comments(text)
    for path, field in leaves(schema):
        name = ".".join(path)
        at(content, path)
        value: Any = shown
        for part in path:
            value = getattr(value, part)
        claim = LEFT_OUT.search(said[path])
        if claim is not None:
            if field.default_factory is None:
                assert yaml.safe_load(claim[1]) == as_written(field.default), f"{name} left out: {claim[1]}"
        elif "required" in said[path].lower():
            assert field.is_required() or name == "decoder", f"{name} is not required"
        else:
            assert value == field.get_default(call_default_factory=True), f"{name}: {value} is not the default"


def as_written(default: object) -> object:
    return str(default) if isinstance(default, Path) else list(default) if isinstance(default, tuple) else default


def keys(content: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in content.items():
        yield (*path, name)
        if isinstance(value, Mapping):
            yield from keys(value, (*path, name))


# ---- the file at the root


def test_every_key_is_in_the_file_with_its_true_default() -> None:
    text = (ROOT / "config.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    shown = validate(Config, {**content, "model": {"path": "x.onnx", "task": "raw"}}, "config.yaml")
    check_documented(Config, text, content, shown)
    said = comments(text)
    sections = {path for path in keys(content) if isinstance(at(content, path), Mapping)}
    assert all(said[path] for path in keys(content) if path not in sections), "a key without a comment"


def test_every_key_of_a_model_is_in_the_file_with_its_true_default(tmp_path: Path) -> None:
    text = (ROOT / "config.yaml").read_text(encoding="utf-8")
    block = re.search(r"(?m)^#\n((?:^#   .*\n)+)^model:", text)
    assert block
    spec = "".join(line[4:] + "\n" for line in block[1].splitlines())
    content = yaml.safe_load(spec)
    (tmp_path / "coco.txt").write_text("person\n")
    shown = ModelSpec.model_validate({**content, "labels": ["person"]})
    check_documented(ModelSpec, spec, content, shown)
    assert all(comments(spec)[path] or path == ("input", "scale") for path in keys(content))


def test_the_file_runs_the_sample() -> None:
    config = load_config(ROOT / "config.yaml")
    assert config.model.path == ROOT / "examples/street/street.onnx"
    assert config.every_camera[0].source == str(ROOT / "var/sample/street.mp4")
    assert config.state_dir == ROOT / "var/state"


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


def test_two_keys_are_enough(folder: Path) -> None:
    config = load_config(write(folder, MINIMAL))
    assert config.backend == "auto"
    assert config.recalibration.automatic
    assert config.mqtt == MqttConfig()
    assert re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) == config.mqtt.device


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


def test_a_model_may_be_named_or_written_out(folder: Path) -> None:
    embedded = {**MINIMAL, "model": {**SPEC, "path": "models/net.onnx"}}
    assert load_config(write(folder, embedded)).model == load_config(write(folder, MINIMAL)).model


def test_a_labels_file_lies_beside_the_spec_that_names_it(folder: Path) -> None:
    (folder / "models" / "names.txt").write_text("cat\ndog\n")
    (folder / "models" / "net.yaml").write_text(yaml.safe_dump({**SPEC, "path": "net.onnx", "labels": "names.txt"}))
    assert load_config(write(folder, MINIMAL)).model.labels == ("cat", "dog")


# ---- refusing


def test_errors_of_the_configuration_and_of_its_model_come_together(folder: Path) -> None:
    (folder / "models" / "net.yaml").write_text("{path: net.onnx, task: dream, labels: gone.txt}")
    content = {**MINIMAL, "threads": 0, "observe": {"held_out": "all"}, "unknown": 1}
    assert refused(write(folder, content)) == [
        "model.task: expected 'classify', 'detect' or 'raw', got 'dream'",
        "model.labels: expected a list, or a readable text file with one label per line, "
        f"got '{folder}/models/gone.txt'",
        "threads: expected greater than or equal to 1, got 0",
        "observe.held_out: expected integer, got 'all'",
        "unknown: unknown key",
    ]


def test_a_frame_by_itself_waits_for_no_other(folder: Path) -> None:
    """It does with `frames: 2`, and whoever copies config.yaml has asked for nothing."""
    said = "batch.wait_s: expected 0 where batch.frames is 1: a frame by itself waits for no other, got 0.1"
    for alone in ({"wait_s": 0.1}, {"frames": 1, "wait_s": 0.1}):
        assert refused(write(folder, {**MINIMAL, "batch": alone})) == [said]
    for batch in ({"frames": 2, "wait_s": 0.1}, {"frames": 1, "wait_s": 0.0}):
        load_config(write(folder, {**MINIMAL, "batch": batch}))


def test_what_is_required_is_asked_for(folder: Path) -> None:
    assert refused(write(folder, "log_level: info\n")) == ["model: missing", "camera: missing"]
    assert refused(write(folder, {"model": 7, "camera": {}})) == [
        "model: expected keys and values, got 7",
        "camera.source: missing",
    ]


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("camera", "speed", [-1, ".nan", ".inf", "quick"]),
        ("camera", "policy", ["newest"]),
        ("observe", "period_s", [0, -1, ".nan", ".inf"]),
        ("observe", "alert_period_s", [0, ".inf"]),
        ("observe", "budget", [0, 1.5, "some"]),
        ("observe", "held_out", [3, 513, 8.5]),
        ("calibration", "frames", [0, "many"]),
        ("calibration", "within_s", [0, -1, ".inf"]),
        ("calibration", "contact_sheet", ["perhaps"]),
        ("calibration", "method", ["", "guess", "percentile:50", "global:0"]),
        ("drift", "tolerance_db", [0, 12, ".nan"]),
        ("drift", "block_s", [0, 1e300]),
        ("drift", "false_alarms_per_30d", [0, ".inf", 1e300]),
        ("recalibration", "automatic", ["perhaps"]),
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
        ("mqtt", "transport", ["udp"]),
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
def test_whatever_a_mapping_holds_it_is_read_or_refused(content: object) -> None:
    if not isinstance(content, dict):
        content = {"camera": content}
    refusal = None
    try:
        validate(Config, content, "config.yaml")
    except ConfigError as error:
        refusal = error
    assert refusal is None or (refusal.code, "\n  " in refusal.found) == ("config.invalid", True)
