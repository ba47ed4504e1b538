"""Train the sample's networks and write street.onnx, or street-TASK.onnx. Needs PyTorch (the `train` extra).

    python -m examples.street.train --cache /tmp/street
    python -m examples.street.train --cache /tmp/street --task segment instance pose depth --epochs 6
    python -m examples.street.train --cache /tmp/street --task obb --epochs 9

Tasks that are named together learn together, from the same pictures. One thread of a 2020s x86 core takes about a
quarter of an hour for each line. The test images come from other traffic than the training images, and the sample video
from traffic that is in neither.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from examples.street.dataset import INPUT_HEIGHT_PX, INPUT_WIDTH_PX, cached_set, render_askew, render_maps, render_set
from examples.street.heads import DeployedHead, StreetHeads
from examples.street.loss import detection_loss, grid, heads_loss
from examples.street.net import Deployed, StreetNet

TRAIN_SEED, TEST_SEED = 10_000, 50_000
_DETECT, _OBB = "detect", "obb"
_TASKS = (_DETECT, "segment", "instance", "pose", _OBB, "depth")
# What the pictures of some tasks are kept as, how they are rendered, and how many are for training and for tests.
_SETS = {
    _DETECT: ("", render_set, 7000, 600),
    _OBB: ("-askew", render_askew, 4000, 200),
    "": ("-maps", render_maps, 3000, 200),
}
_PEAK_RATE, _WARMUP_STEPS, _WEIGHT_DECAY = 3e-3, 150, 0.03
_AVERAGE_DECAY = 0.998
_BATCH = {_DETECT: 32, "": 16}
_OPSET = {_DETECT: 13, "": 17}

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def _as_input(pictures: Tensor) -> Tensor:
    """uint8 (batch, rows, columns, 3) to float (batch, 3, rows, columns) in [0, 1], as an engine gets it."""
    return pictures.permute(0, 3, 1, 2).float() / 255.0


def _rate(step: int, steps: int) -> float:
    """Learning rate: linear warm-up, then half a cosine to zero."""
    if step < _WARMUP_STEPS:
        return _PEAK_RATE * (step + 1) / _WARMUP_STEPS
    return _PEAK_RATE * 0.5 * (1.0 + math.cos(math.pi * (step - _WARMUP_STEPS) / max(steps - _WARMUP_STEPS, 1)))


@torch.no_grad()
def _move_average(average: nn.Module, net: nn.Module, step: int) -> None:
    decay = min(_AVERAGE_DECAY, (1 + step) / (10 + step))
    for kept, new in zip(average.state_dict().values(), net.state_dict().values(), strict=True):
        if kept.is_floating_point():
            kept.lerp_(new, 1.0 - decay)
        else:
            kept.copy_(new)


@torch.no_grad()
def _test_loss(net: nn.Module, loss: Loss, tests: Batch) -> float:
    net.eval()
    count = len(tests["pictures"])
    batches = [_batch(tests, chosen) for chosen in torch.split(torch.arange(count), _BATCH[_DETECT])]
    return sum(loss(net, batch).item() * len(batch["pictures"]) for batch in batches) / count


def _batch(images: Batch, chosen: Tensor) -> Batch:
    return {name: values[chosen] for name, values in images.items()}


def _loss(task: str) -> Loss:
    """The loss of a batch, for the detector or for other heads."""
    corners, strides = grid()
    if task == _DETECT:
        return lambda net, batch: detection_loss(_said(net, batch), batch["objects"], corners, strides)
    return lambda net, batch: heads_loss(_said(net, batch), batch, corners, strides)


def _said(net: nn.Module, batch: Batch) -> Any:
    return net(_as_input(batch["pictures"]).contiguous(memory_format=torch.channels_last))


def train(cache: Path, tasks: Sequence[str], epochs: int, seed: int) -> nn.Module:
    """Train on frames kept in `cache`; returns the moving average of the weights."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the layers are too small to share: a second thread waits more than it works
    name, render, *counts = _SETS[tasks[0] if tasks[0] in _SETS else ""]
    images, tests = (
        {key: torch.from_numpy(values) for key, values in cached_set(path, count, first_seed, render).items()}
        for path, count, first_seed in (
            (cache / f"train{name}.npz", counts[0], TRAIN_SEED),
            (cache / f"test{name}.npz", counts[1], TEST_SEED),
        )
    )
    net: nn.Module = StreetNet() if tasks[0] == _DETECT else StreetHeads(tasks)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
    average, loss_of = copy.deepcopy(net), _loss(tasks[0])
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=_WEIGHT_DECAY)
    count, size = len(images["pictures"]), _BATCH.get(tasks[0], _BATCH[""])
    steps, step, start = epochs * (count // size), 0, time.monotonic()
    for epoch in range(epochs):
        net.train()
        total = 0.0
        for chosen in torch.split(torch.randperm(count), size)[: count // size]:
            for group in optimiser.param_groups:
                group["lr"] = _rate(step, steps)
            loss = loss_of(net, _batch(images, chosen))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]  # see above
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimiser.step()
            _move_average(average, net, step)
            total, step = total + loss.item(), step + 1
        mean, test = total / (count // size), _test_loss(average, loss_of, tests)
        took = time.monotonic() - start
        print(
            f"epoch {epoch + 1}/{epochs} loss {mean:.3f} test {test:.3f} {took:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return average


def export(net: nn.Module, task: str, folder: Path) -> None:
    """Write the ONNX file of a task, batch normalisation folded: street.onnx of the detector, else street-TASK.onnx.

    Its input `images` is (1, 3, 160, 288); the detector's output `detections` is (1, 900, 7), others are those of
    `DeployedHead`.
    """
    example = torch.zeros(1, 3, INPUT_HEIGHT_PX, INPUT_WIDTH_PX)
    deployed = (Deployed(net) if isinstance(net, StreetNet) else DeployedHead(net, task)).eval()
    outputs = {_DETECT: ["detections"], "segment": ["scores"], "depth": ["metres"]}.get(task, ["objects", "prototypes"])
    path = folder / ("street.onnx" if task == _DETECT else f"street-{task}.onnx")
    torch.onnx.export(
        deployed,
        (example,),
        str(path),
        input_names=["images"],
        output_names=outputs if task == "instance" else outputs[:1],
        opset_version=_OPSET.get(task, _OPSET[""]),
        dynamo=False,
    )
    onnx.checker.check_model(onnx.load(path), full_check=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the sample's networks.")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the rendered images")
    parser.add_argument("--task", nargs="+", choices=_TASKS, default=[_DETECT])
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent, help="folder for the ONNX files")
    args = parser.parse_args()
    if len(args.task) > 1 and {_DETECT, _OBB} & set(args.task):
        parser.error("detect and obb have pictures of their own, so each is trained alone")
    net = train(args.cache, args.task, args.epochs, args.seed)
    for task in args.task:
        export(net, task, args.output)


if __name__ == "__main__":
    main()
