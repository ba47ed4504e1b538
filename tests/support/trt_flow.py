"""TensorRT's calls from a graph to an inference, one by one, as the tests of the fake want to get them wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_tensorrt import FakeTensorRt
from onnx import ModelProto
from zoo import Net

from engines.cuda.kernels import Array

Bounds = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
SHAPE = (1, 3, 8, 8)
BOUNDS: Bounds = ((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
WIDE: Bounds = ((8, 3, 8, 8), (8, 3, 8, 8), (9, 3, 8, 8))


def small_net(batch: int | str = 1, fixed: tuple[int, ...] = (3, 8, 8)) -> ModelProto:
    """Two convolutions with a Relu (t1) between them; the output is t2."""
    net = Net((batch, *fixed))
    return net.model(net.conv(net.node("Relu", net.conv("image", 3, 4)), 4, 4), opset=19, ir_version=9)


class Flow:
    """One process's TensorRT. messages: what its logger got, as (severity, message)."""

    def __init__(self, fake: FakeTensorRt) -> None:
        self.fake, self.trt, self.pycuda = fake, fake.module, fake.pycuda
        self.messages: list[tuple[str, str]] = []
        self.logger = self.new_logger(self.messages)
        self.profiles: list[Bounds] = []
        self.mark_debug: Sequence[str] = ()
        self.monitor: Any = None
        self.memory: dict[str, Any] = {}
        self.context: Any = None
        self.stream: Any = None

    @property
    def errors(self) -> list[str]:
        return [message for severity, message in self.messages if severity == "Severity.ERROR"]

    def new_logger(self, messages: list[tuple[str, str]]) -> Any:
        class Logger(self.trt.ILogger):  # type: ignore[misc, name-defined]  # the class is known only at run time
            def log(self, severity: Any, message: str) -> None:
                messages.append((str(severity), message))

        return Logger()

    def network(self, model: ModelProto) -> tuple[Any, Any]:
        """A parsed network, and its parser."""
        builder = self.trt.Builder(self.logger)
        network = builder.create_network(1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = self.trt.OnnxParser(network, self.logger)
        assert parser.parse(model.SerializeToString()), parser.get_error(0)
        return network, parser

    def build(self, model: ModelProto) -> bytes | None:
        builder, (network, parser) = self.trt.Builder(self.logger), self.network(model)
        for name in self.mark_debug:
            assert network.mark_debug(tensor(network, name))
        config = builder.create_builder_config()
        if self.monitor is not None:
            config.progress_monitor = self.monitor
        for bounds in self.profiles:
            profile = builder.create_optimization_profile()
            profile.set_shape("image", *bounds)
            config.add_optimization_profile(profile)
        built = builder.build_serialized_network(network, config)
        del parser
        return None if built is None else bytes(built)

    def load(self, plan: bytes | None) -> Any:
        """An execution context for a plan, with a stream; a CUDA context stays current until `close`."""
        assert plan is not None, self.errors
        self.pycuda.push()
        engine = self.trt.Runtime(self.logger).deserialize_cuda_engine(plan)
        assert engine is not None, self.errors
        self.stream = self.pycuda.driver.Stream(1)
        self.context = engine.create_execution_context()
        return engine

    def bind(self, engine: Any, batch: int = 1) -> None:
        """Memory for all inputs and outputs, at the sizes of an input of so many images."""
        self.context.set_input_shape("image", (batch, *SHAPE[1:]))
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            nbytes = int(np.prod(self.context.get_tensor_shape(name))) * 4
            self.memory[name] = self.pycuda.driver.mem_alloc(nbytes)
            assert self.context.set_tensor_address(name, int(self.memory[name]))

    def write(self, batch: Array) -> None:
        self.pycuda.driver.memcpy_htod_async(int(self.memory["image"]), batch, self.stream)

    def run(self) -> bool:
        done: bool = self.context.execute_async_v3(self.stream.handle)
        return done

    def close(self) -> None:
        """Wait, free everything, and leave the CUDA context."""
        self.stream.synchronize()
        self.memory.clear()
        self.context = None
        self.pycuda.driver.Context.pop()


class Monitor:
    """The calls of a progress monitor; `answers` raises or answers in its stead, by call and phase."""

    def __init__(self, fake: FakeTensorRt, answers: dict[tuple[str, str], Any] | None = None) -> None:
        self.seen: list[tuple[Any, ...]] = []
        seen, answers = self.seen, answers or {}

        def note(call: str, phase: str, *details: Any) -> Any:
            seen.append((call, phase, *details))
            answer = answers.get((call, phase), True)
            if isinstance(answer, Exception):
                raise answer
            return answer

        class Watch(fake.module.IProgressMonitor):  # type: ignore[misc, name-defined]  # known only at run time
            def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
                note("start", phase, parent, steps)

            def step_complete(self, phase: str, step: int) -> bool:
                return bool(note("step", phase, step))

            def phase_finish(self, phase: str) -> None:
                note("finish", phase)

        self.monitor = Watch()


def tensor(network: Any, name: str) -> Any:
    """A tensor of a network by its name."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    tensors = [layer.get_output(index) for layer in layers for index in range(layer.num_outputs)]
    return next(t for t in (*map(network.get_input, range(network.num_inputs)), *tensors) if t.name == name)
