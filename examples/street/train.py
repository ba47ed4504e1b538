"""Train the sample detector and write street.onnx. Needs PyTorch (the `train` extra).

    python -m examples.street.train --cache /tmp/street

One thread of a 2020s x86 core takes about a quarter of an hour. The test images come from other traffic than
the training images, and the sample video from traffic that is in neither.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from pathlib import Path

import onnx
import torch
from torch import Tensor

from examples.street.dataset import INPUT_HEIGHT_PX, INPUT_WIDTH_PX, cached_set
from examples.street.loss import detection_loss, grid
from examples.street.net import Deployed, StreetNet

TRAIN_SEED, TEST_SEED = 10_000, 50_000
_TRAIN_IMAGES, _TEST_IMAGES = 7000, 600
_BATCH = 32
_PEAK_RATE, _WARMUP_STEPS, _WEIGHT_DECAY = 3e-3, 150, 0.03
_AVERAGE_DECAY = 0.998
_OPSET = 13


def _as_input(pictures: Tensor) -> Tensor:
    """uint8 (batch, rows, columns, 3) to float (batch, 3, rows, columns) in [0, 1], as an engine gets it."""
    return pictures.permute(0, 3, 1, 2).float() / 255.0


def _rate(step: int, steps: int) -> float:
    """Learning rate: linear warm-up, then half a cosine to zero."""
    if step < _WARMUP_STEPS:
        return _PEAK_RATE * (step + 1) / _WARMUP_STEPS
    return _PEAK_RATE * 0.5 * (1.0 + math.cos(math.pi * (step - _WARMUP_STEPS) / max(steps - _WARMUP_STEPS, 1)))


@torch.no_grad()
def _move_average(average: StreetNet, net: StreetNet, step: int) -> None:
    decay = min(_AVERAGE_DECAY, (1 + step) / (10 + step))
    for kept, new in zip(average.state_dict().values(), net.state_dict().values(), strict=True):
        if kept.is_floating_point():
            kept.lerp_(new, 1.0 - decay)
        else:
            kept.copy_(new)


@torch.no_grad()
def _test_loss(net: StreetNet, pictures: Tensor, objects: Tensor) -> float:
    corners, strides = grid()
    net.eval()
    batches = list(zip(torch.split(pictures, _BATCH), torch.split(objects, _BATCH), strict=True))
    losses = [detection_loss(net(_as_input(x)), y, corners, strides).item() * len(x) for x, y in batches]
    return sum(losses) / len(pictures)


def train(cache: Path, epochs: int, seed: int) -> StreetNet:
    """Train on frames kept in `cache`; returns the moving average of the weights."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the layers are too small to share: a second thread waits more than it works
    pictures, objects = map(torch.from_numpy, cached_set(cache / "train.npz", _TRAIN_IMAGES, TRAIN_SEED))
    tests = tuple(map(torch.from_numpy, cached_set(cache / "test.npz", _TEST_IMAGES, TEST_SEED)))
    net: StreetNet = StreetNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
    average: StreetNet = copy.deepcopy(net)
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=_WEIGHT_DECAY)
    corners, strides = grid()
    steps, step, start = epochs * (len(pictures) // _BATCH), 0, time.monotonic()
    for epoch in range(epochs):
        net.train()
        total = 0.0
        for chosen in torch.split(torch.randperm(len(pictures)), _BATCH)[: len(pictures) // _BATCH]:
            for group in optimiser.param_groups:
                group["lr"] = _rate(step, steps)
            logits = net(_as_input(pictures[chosen]).contiguous(memory_format=torch.channels_last))
            loss = detection_loss(logits, objects[chosen], corners, strides)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]  # see above
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimiser.step()
            _move_average(average, net, step)
            total, step = total + loss.item(), step + 1
        mean, test = total / (len(pictures) // _BATCH), _test_loss(average, *tests)
        took = time.monotonic() - start
        print(
            f"epoch {epoch + 1}/{epochs} loss {mean:.3f} test {test:.3f} {took:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return average


def export(net: StreetNet, path: Path) -> None:
    """Write ONNX: `images` (1, 3, 160, 288) to `detections` (1, 900, 7), batch normalisation folded."""
    example = torch.zeros(1, 3, INPUT_HEIGHT_PX, INPUT_WIDTH_PX)
    deployed = Deployed(net).eval()
    torch.onnx.export(
        deployed,
        (example,),
        str(path),
        input_names=["images"],
        output_names=["detections"],
        opset_version=_OPSET,
        dynamo=False,
    )
    onnx.checker.check_model(onnx.load(path), full_check=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the sample detector.")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the rendered images")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_name("street.onnx"))
    args = parser.parse_args()
    export(train(args.cache, args.epochs, args.seed), args.output)


if __name__ == "__main__":
    main()
