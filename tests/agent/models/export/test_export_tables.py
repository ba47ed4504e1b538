"""Calibration tables, written and read: TensorRT's caches, ONNX Runtime's tables, graphs with Q/DQ."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bench import Bench
from half_zoo import noise_db
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.calibrate import TensorData, load_tensors_data
from onnxruntime.quantization.CalTableFlatBuffers.TrtTable import TrtTable
from onnxruntime.quantization.quant_utils import write_calibration_table
from repair_flow import frames_for, proposed, uneven_net
from zoo import Net, run

from agent.common.errors import AgentError
from agent.models.export.foreign_scales import read_ranges
from agent.models.export.tables import scale_hex
from agent.models.model import open_model
from agent.vision.spec import load_model_spec
from calibrate.histogram import abs_histogram
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.quantise.equalise import equalised_name


def amax(bench: Bench) -> dict[str, float]:
    """The ranges that the bench's calibration chose."""
    return dict(load_calibration(bench / "calibration.json").amax)


def of_the_graph(bench: Bench) -> dict[str, float]:
    """The same, with the tensors that hold moved values of these under the same scale: what Flatten makes."""
    own, nodes = amax(bench), onnx.load(bench / "artefact" / "engine.onnx").graph.node
    moved = {node.output[0]: node for node in nodes if node.op_type == "Flatten"}
    return {**own, **{name: own[node.input[0].removesuffix(".dequantised")] for name, node in moved.items()}}


def exported(bench: Bench, to: str) -> Path:
    bench.json("export", bench / "artefact", "--to", to, "-o", bench / to)
    return bench / to


def brought(bench: Bench, cache: Path, *more: object) -> tuple[Calibration, dict[str, Any]]:
    output = bench / "brought.json"
    printed, _ = bench.json_and_check("calibrate", bench / "model.yaml", "--from-cache", cache, "-o", output, *more)
    return load_calibration(output), printed["cache"]


def test_a_tensorrt_cache_has_a_header_and_big_endian_scales(bench: Bench) -> None:
    folder = exported(bench, "tensorrt-cache")
    assert scale_hex(1.0 / 127.0) == "3c010204"
    headers = {"8.5.2": "TRT-8502", "10.3.0": "TRT-100300", "10.13.3": "TRT-101303"}
    for release, header in headers.items():
        first, *lines = (folder / f"calibration_{release}.cache").read_text(encoding="ascii").splitlines()
        assert first == f"{header}-EntropyCalibration2"
        scales = {name: struct.unpack(">f", bytes.fromhex(word))[0] for name, word in (s.split(": ") for s in lines)}
        assert scales == pytest.approx({name: value / 127 for name, value in of_the_graph(bench).items()}, rel=1e-6)
    model = onnx.load(folder / "model.onnx")  # what the names are of
    onnx.checker.check_model(model, full_check=True)
    named = {name for node in model.graph.node for name in (*node.input, *node.output)}
    assert named >= set(scales)
    assert not any("Quantize" in node.op_type for node in model.graph.node)


def test_a_table_of_repaired_tensors_fits_the_network_beside_it(bench: Bench) -> None:
    """A plan that divides an input makes a new tensor, which the original file does not have."""
    spec = bench.spec("uneven", uneven_net(), task="raw", labels=[])
    calibration = bench / "uneven.json"
    bench.json_and_check("calibrate", spec, "--frames", bench / "clip.avi", "-o", calibration)
    model = open_model(load_model_spec(spec))
    plan = PrecisionPlan({}, proposed(model.master, frames_for(model.master), ("divisors",)).repairs)
    divided = [equalised_name(layer) for layer in plan.repairs.divisors]
    assert divided
    (bench / "plan.json").write_text(plan.to_json())
    repaired = bench.built("repaired", "--calibration", calibration, "--plan", bench / "plan.json", model=spec)
    bench.json("export", repaired, "--to", "tensorrt-cache", "-o", bench / "cache")
    ranges = read_ranges(bench / "cache" / "calibration_10.3.0.cache").amax
    network = onnx.load(bench / "cache" / "model.onnx")
    onnx.checker.check_model(network, full_check=True)
    named = {name for node in network.graph.node for name in (*node.input, *node.output)}
    assert set(divided) <= set(ranges) <= named
    image = frames_for(model.master)[0]
    (true,), (found,) = run(model.master, image).values(), run(network, image).values()
    assert noise_db({"": true}, {"": found}) < -25.0  # weights of 8 bits


def test_scales_come_back_and_build_the_very_same_engine(bench: Bench) -> None:
    own = (bench / "artefact" / "engine.onnx").read_bytes()
    caches = {
        "tensorrt-entropy": exported(bench, "tensorrt-cache") / "calibration_10.3.0.cache",
        "onnxruntime-table": exported(bench, "onnxruntime") / "calibration.flatbuffers",
        "qdq-graph": exported(bench, "onnx") / "model.onnx",
    }
    for kind, cache in caches.items():
        calibration, printed = brought(bench, cache)
        assert (calibration.method, calibration.frames, printed["kind"]) == (kind, 0, kind)
        assert (printed["tensors"], printed["from_frames"], printed["differences"]) == (len(amax(bench)), [], [])
        again = bench.built(kind, "--calibration", bench / "brought.json")
        assert (again / "engine.onnx").read_bytes() == own
        bench.text("report", bench / "brought.json", "-o", bench / f"{kind}.html")  # it has no histograms
        assert kind in (bench / f"{kind}.html").read_text()


def test_min_max_caches_are_read_and_compared_with_the_frames(bench: Bench) -> None:
    name, value = next(iter(amax(bench).items()))
    lines = [f"{tap}: {scale_hex(each / 127)}" for tap, each in amax(bench).items() if tap != name]
    lines += [f"{name}: {scale_hex(4.0 * value / 127)}", "(Unnamed Layer* 5) [Shuffle]_output: 3c010204"]
    cache = bench / "old.cache"
    cache.write_text("\n".join(["TRT-8503-MinMaxCalibration", *lines]) + "\n")
    calibration, printed = brought(bench, cache, "--frames", bench / "clip.avi")
    assert calibration.method == "tensorrt-min-max"
    assert calibration.amax[name] == pytest.approx(4.0 * value)
    assert calibration.histograms == load_calibration(bench / "calibration.json").histograms
    first, *others = printed["differences"]
    assert first["tensor"] == name
    assert first["db"] == pytest.approx(20 * np.log10(4.0), abs=1.5)  # steps of four times the size
    assert all(abs(each["db"]) < 0.01 for each in others)
    assert len(others) == len(amax(bench)) - 1
    said = bench.text(
        *("calibrate", bench / "model.yaml", "--from-cache", cache, "--frames", bench / "clip.avi"),
        *("-o", bench / "brought.json"),
    )
    assert f"+{first['db']:.1f}" in said


def test_tensors_that_a_cache_lacks_come_from_frames_or_are_refused(bench: Bench) -> None:
    own = amax(bench)
    lacking = next(reversed(own))
    cache = bench / "short.cache"
    lines = [f"{tap}: {scale_hex(each / 127)}" for tap, each in own.items() if tap != lacking]
    cache.write_text("\n".join(["TRT-100300-EntropyCalibration2", *lines]) + "\n")
    output = ["-o", bench / "brought.json"]
    refusal = bench.refuses("calibrate", bench / "model.yaml", "--from-cache", cache, *output)
    assert refusal.startswith(f"cache.tensors: no range for 1 of {len(own)} tensors, '{lacking}'")
    assert "add --frames" in refusal
    calibration, printed = brought(bench, cache, "--frames", bench / "clip.avi")
    assert printed["from_frames"] == [lacking]
    assert calibration.amax == pytest.approx(own, rel=1e-6)
    cache.write_text("TRT-100300-EntropyCalibration2\nelsewhere: 3c010204\n")
    assert "give the file that was made for this model" in bench.refuses(
        "calibrate", bench / "model.yaml", "--from-cache", cache, *output
    )


def test_the_range_of_a_concat_counts_for_what_it_reads(bench: Bench) -> None:
    """ModelOpt quantises the Concat's output; tared observes its inputs, which share one scale."""
    net = Net((1, 3, 8, 8))
    branches = [net.node("Relu", net.conv("image", 3, 4)) for _ in range(2)]
    joined = net.node("Concat", *branches, axis=1)
    model = net.model(net.node("Flatten", net.node("GlobalAveragePool", net.conv(joined, 8, 5))))
    spec = bench.spec("joined", model)
    cache = bench / "joined.cache"
    cache.write_text(f"TRT-100300-EntropyCalibration2\nimage: {scale_hex(0.01)}\n{joined}: {scale_hex(0.5)}\n")
    printed = bench.json("calibrate", spec, "--from-cache", cache, "-o", bench / "joined.json")
    amax = load_calibration(bench / "joined.json").amax
    assert amax == pytest.approx({"image": 1.27, **dict.fromkeys(branches, 63.5)})
    assert printed["cache"]["tensors"] == 3


def test_onnxruntime_s_own_tools_read_its_table(bench: Bench) -> None:
    folder, own = exported(bench, "onnxruntime"), of_the_graph(bench)
    table = load_tensors_data(folder / "calibration.json")
    assert {name: float(data.range_value[1]) for name, data in table.items()} == pytest.approx(own, rel=1e-6)
    assert all(data.range_value[0] == -data.range_value[1] for data in table.values())
    buffers = TrtTable.GetRootAs((folder / "calibration.flatbuffers").read_bytes(), 0)
    entries = [buffers.Dict(index) for index in range(buffers.DictLength())]
    found = {entry.Key().decode(): float(entry.Value()) for entry in entries}
    assert found == pytest.approx(own, rel=1e-6)
    text = dict(line.rsplit(" ", 1) for line in (folder / "calibration.cache").read_text().splitlines())
    assert {name: float(value) for name, value in text.items()} == found


def test_onnxruntime_s_tables_are_read_by_their_largest_magnitude(bench: Bench) -> None:
    """Its own JSON has both ends; its other two files have lost the lower one, which is the larger here."""
    data = TensorData(lowest=np.array(-10.0, np.float32), highest=np.array(1.0, np.float32))
    write_calibration_table({"image": data}, str(bench.folder / "artefact" / ".."))
    assert read_ranges(bench / "calibration.cache").amax == {"image": 1.0}
    assert read_ranges(bench / "calibration.flatbuffers").amax == {"image": 1.0}
    assert read_ranges(bench / "calibration.json").amax == {"image": 10.0}


def test_a_graph_that_onnxruntime_has_quantised_gives_its_scales(bench: Bench) -> None:
    """Also asymmetric uint8: the range is what the integers reach."""
    images = np.random.default_rng(0).uniform(-1.0, 0.5, (8, 1, 3, 8, 8)).astype(np.float32)

    class Images(CalibrationDataReader):  # type: ignore[misc]  # no type information
        def __init__(self) -> None:
            self.left = iter(images)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.left, None)
            return None if image is None else {"image": image}

    for symmetric in (True, False):
        kind = QuantType.QInt8 if symmetric else QuantType.QUInt8
        quantize_static(
            bench / "model.onnx",
            bench / "quantised.onnx",
            Images(),
            quant_format=QuantFormat.QDQ,
            activation_type=kind,
            weight_type=QuantType.QInt8,
            extra_options={"ActivationSymmetric": symmetric, "WeightSymmetric": True},
        )
        found = read_ranges(bench / "quantised.onnx")
        assert found.kind == "qdq-graph"
        assert found.amax["image"] == pytest.approx(abs_histogram(images).amax, rel=0.01)
        calibration, _ = brought(bench, bench / "quantised.onnx", "--frames", bench / "clip.avi")
        assert calibration.amax["image"] == found.amax["image"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("x.cache", b"TRT-8503-LegacyCalibration\n", "first line"),
        ("x.cache", b"TRT-8503-EntropyCalibration2\nimage 3c010204\n", "line 2 'image 3c010204'"),
        ("x.cache", b"TRT-8503-EntropyCalibration2\n", "no tensor"),
        ("x.cache", b"TRT-8503-EntropyCalibration2\nimage: 7fc00000\n", "range nan of tensor 'image'"),
        ("x.json", b'{"image": {"lowest": 1}}', "highest"),
        ("x.json", b'{"image"', "Expecting"),
        ("x.flatbuffers", b"\xff" * 64, ""),
        ("x.txt", b"\x00\xff\xfe", ""),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, name: str, content: bytes, found: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AgentError) as caught:
        read_ranges(tmp_path / name)
    assert caught.value.code == "cache.format"
    assert found in caught.value.found


def test_a_cache_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"cache\.missing"):
        read_ranges(tmp_path / "nothing")


def test_ppq_s_setting_follows_the_graph(bench: Bench) -> None:
    folder = exported(bench, "ppq")
    table = json.loads((folder / "setting.json").read_text())["dispatching_table"]["dispatchings"]
    layers = [node.name for node in onnx.load(folder / "model.onnx").graph.node if node.op_type in ("Conv", "Gemm")]
    assert table == dict.fromkeys(layers, 101)
    assert json.loads((folder / "ranges.json").read_text())["act_quant_info"] == pytest.approx(
        of_the_graph(bench), rel=1e-6
    )
