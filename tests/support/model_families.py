"""One small graph of each family of models, with the outputs that its exporter gives, for an image of 64x96."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper
from zoo import Net, Shape

CLASSES = 3
KEYPOINTS = 5
IMAGE = (1, 3, 64, 96)
STRIDES = (8, 16, 32)


def _named(net: Net, tensor: str, name: str) -> str:
    net.nodes.append(helper.make_node("Identity", [tensor], [name], name=name))
    return name


def _ints(net: Net, *values: int) -> str:
    return net.constant(np.array(values, np.int64))


def _map(net: Net, stride: int, channels: int) -> str:
    return net.conv("image", 3, channels, strides=[stride, stride])


def _sigmoid(net: Net, stride: int, channels: int) -> str:
    return net.node("Sigmoid", _map(net, stride, channels))


def _flat(net: Net, tensor: str, channels: int) -> str:
    """(1, channels, cells)"""
    return net.node("Reshape", tensor, _ints(net, 1, channels, -1))


def _rows(net: Net, tensor: str, channels: int) -> str:
    return net.node("Transpose", _flat(net, tensor, channels), perm=[0, 2, 1])


def _joined(net: Net, tensors: Sequence[str], axis: int) -> str:
    return net.node("Concat", *tensors, axis=axis)


def _yolox(net: Net) -> str:
    parts = [
        _joined(net, [_map(net, stride, 4), _sigmoid(net, stride, 1), _sigmoid(net, stride, CLASSES)], 1)
        for stride in STRIDES
    ]
    return _joined(net, [_rows(net, part, 5 + CLASSES) for part in parts], 1)


def yolox(net: Net) -> ModelProto:
    return net.model(_yolox(net))


def yolox_decoded(net: Net) -> ModelProto:
    return net.model(net.node("Mul", _yolox(net), net.constant(np.full((1, 1, 1), 8, np.float32))))


def yolov5(net: Net) -> ModelProto:
    anchored = []
    for stride in STRIDES:
        cells = net.node("Reshape", _sigmoid(net, stride, 3 * 8), _ints(net, 1, 3, 8, -1))
        anchored.append(
            net.node("Reshape", net.node("Transpose", cells, perm=[0, 1, 3, 2]), _ints(net, 1, -1, 5 + CLASSES))
        )
    return net.model(net.node("Mul", _joined(net, anchored, 1), net.constant(np.full((1, 1, 1), 8, np.float32))))


def yolov8(net: Net) -> ModelProto:
    boxes = _joined(net, [_flat(net, _map(net, stride, 4), 4) for stride in STRIDES], 2)
    classes = _joined(net, [_flat(net, _map(net, stride, CLASSES), CLASSES) for stride in STRIDES], 2)
    pixels = net.node("Mul", boxes, net.constant(np.full((1, 1, 1), 8, np.float32)))
    return net.model(_joined(net, [pixels, net.node("Sigmoid", classes)], 1))


def _with_extras(net: Net, extras: int) -> str:
    """YOLOv8's table with channels behind its classes."""
    boxes = _joined(net, [_flat(net, _map(net, stride, 4), 4) for stride in STRIDES], 2)
    classes = _joined(net, [_flat(net, _map(net, stride, CLASSES), CLASSES) for stride in STRIDES], 2)
    others = _joined(net, [_flat(net, _map(net, stride, extras), extras) for stride in STRIDES], 2)
    pixels = net.node("Mul", boxes, net.constant(np.full((1, 1, 1), 8, np.float32)))
    return _joined(net, [pixels, net.node("Sigmoid", classes), others], 1)


def _best_rows(net: Net, extras: int) -> str:
    """The table of an end-to-end graph."""
    rows = _rows(net, _map(net, 8, 6 + extras), 6 + extras)
    return net.node("TopK", rows, _ints(net, 20), outputs=2, axis=1)


def _prototypes(net: Net) -> str:
    return _named(net, _map(net, 4, 8), "output1")


def yolov8_seg(net: Net) -> ModelProto:
    return net.model(_with_extras(net, 8), _prototypes(net))


def yolov8_pose(net: Net) -> ModelProto:
    return net.model(_with_extras(net, 3 * KEYPOINTS))


def yolov8_obb(net: Net) -> ModelProto:
    return net.model(_with_extras(net, 1))


def yolo26_seg(net: Net) -> ModelProto:
    return net.model(_best_rows(net, 8), _prototypes(net))


def yolo26_pose(net: Net) -> ModelProto:
    return net.model(_best_rows(net, 3 * KEYPOINTS))


def yolo26_obb(net: Net) -> ModelProto:
    return net.model(_best_rows(net, 1))


def end2end(net: Net) -> ModelProto:
    return net.model(net.node("TopK", _rows(net, _map(net, 8, 6), 6), _ints(net, 20), outputs=2, axis=1))


def ssd(net: Net) -> ModelProto:
    scores = net.node("Softmax", _rows(net, _map(net, 8, 1 + CLASSES), 1 + CLASSES), axis=2)
    centres, sides = (net.node("Tanh", _rows(net, _map(net, 8, 2), 2)) for _ in range(2))
    centres = net.node("Add", _times(net, centres, 0.3), net.constant(np.full(1, 0.5, np.float32)))
    half = _times(net, net.node("Exp", sides), 0.1)
    boxes = _joined(net, [net.node("Sub", centres, half), net.node("Add", centres, half)], 2)
    return net.model(_named(net, scores, "scores"), _named(net, boxes, "boxes"))


def _times(net: Net, tensor: str, factor: float) -> str:
    return net.node("Mul", tensor, net.constant(np.full(1, factor, np.float32)))


def ssd_offsets(net: Net) -> ModelProto:
    """SSD whose boxes are offsets from priors, which its graph does not have."""
    scores = net.node("Softmax", _rows(net, _map(net, 8, 1 + CLASSES), 1 + CLASSES), axis=2)
    offsets = _times(net, _rows(net, _map(net, 8, 4), 4), 0.1)
    return net.model(_named(net, scores, "scores"), _named(net, offsets, "boxes"))


def yolov8_undecoded(net: Net) -> ModelProto:
    """YOLOv8 cut off before its decoding: bins of distances, and logits."""
    return net.model(_joined(net, [_flat(net, _map(net, stride, 64 + CLASSES), 64 + CLASSES) for stride in STRIDES], 2))


def fastestdet(net: Net) -> ModelProto:
    classes = net.node("Softmax", _map(net, 16, CLASSES), axis=1)
    return net.model(_joined(net, [_sigmoid(net, 16, 1), _map(net, 16, 4), classes], 1))


def _nanodet(net: Net, strides: Sequence[int]) -> ModelProto:
    parts = [_joined(net, [_sigmoid(net, stride, CLASSES), _map(net, stride, 32)], 1) for stride in strides]
    return net.model(_joined(net, [_rows(net, part, 32 + CLASSES) for part in parts], 1))


def nanodet(net: Net) -> ModelProto:
    return _nanodet(net, STRIDES)


def nanodet_plus(net: Net) -> ModelProto:
    return _nanodet(net, (*STRIDES, 64))


def nanodet_by_stride(net: Net) -> ModelProto:
    classes = [_rows(net, _sigmoid(net, stride, CLASSES), CLASSES) for stride in STRIDES]
    sides = [_rows(net, _map(net, stride, 44), 44) for stride in STRIDES]
    names = [_named(net, part, f"cls_pred_stride_{s}") for s, part in zip(STRIDES, classes, strict=True)]
    names += [_named(net, part, f"dis_pred_stride_{s}") for s, part in zip(STRIDES, sides, strict=True)]
    return net.model(*names)


def yunet(net: Net) -> ModelProto:
    columns = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    names = [
        _named(net, _rows(net, _sigmoid(net, stride, width), width), f"{kind}_{stride}")
        for kind, width in columns.items()
        for stride in STRIDES
    ]
    return net.model(*names)


def _pooled(net: Net) -> str:
    return net.node("Flatten", net.node("GlobalAveragePool", _map(net, 8, 8)))


def classifier(net: Net) -> ModelProto:
    return net.model(net.node("Gemm", _pooled(net), net.weight(CLASSES, 8), net.weight(CLASSES), transB=1))


def softmax_classifier(net: Net) -> ModelProto:
    return net.model(net.node("Softmax", net.node("MatMul", _pooled(net), net.weight(8, CLASSES)), axis=1))


def squeezed_classifier(net: Net) -> ModelProto:
    """SqueezeNet's: (1, classes, 1, 1), pooled behind its last layer."""
    return net.model(net.node("GlobalAveragePool", net.conv(_map(net, 8, 8), 8, CLASSES)))


def squeezed_softmax(net: Net) -> ModelProto:
    return net.model(net.node("Softmax", net.node("GlobalAveragePool", _map(net, 8, CLASSES)), axis=1))


def segmentation(net: Net) -> ModelProto:
    """torchvision's: scores of a stride, brought to the size of the image."""
    scale = net.constant(np.array([1.0, 1.0, 8.0, 8.0], np.float32))
    return net.model(net.node("Resize", _map(net, 8, CLASSES + 2), "", scale, mode="linear"))


def segmentation_argmax(net: Net) -> ModelProto:
    return net.model(net.node("Cast", net.node("ArgMax", _map(net, 4, CLASSES + 2), axis=1, keepdims=0), to=1))


def one_mask(net: Net) -> ModelProto:
    return net.model(_sigmoid(net, 2, 1))


def _first(net: Net, tensor: str = "image") -> str:
    """The image of a graph of TensorFlow, with channels first."""
    return net.node("Transpose", tensor, perm=[0, 3, 1, 2])


def _last(net: Net, tensor: str) -> str:
    return net.node("Transpose", tensor, perm=[0, 2, 3, 1])


def mediapipe_mask(net: Net) -> ModelProto:
    """MediaPipe's selfie mask: channels last, and a sigmoid behind a transposed convolution."""
    deep = net.node("Relu", net.conv(_first(net), 3, 8, strides=[2, 2]))
    mask = net.node("ConvTranspose", deep, net.weight(8, 1, 2, 2), net.weight(1), strides=[2, 2])
    return net.model(_last(net, net.node("Sigmoid", mask)))


def blazepose(net: Net) -> ModelProto:
    """MediaPipe's body: points with visibility and presence, a score, a mask, heatmaps, the points in metres."""
    image = _first(net)
    pooled = net.node("GlobalAveragePool", net.conv(image, 3, 8, strides=[8, 8]))

    def vector(length: int) -> str:
        parameters = net.weight(length, 8, 1, 1), net.weight(length)
        return net.node("Reshape", net.node("Conv", pooled, *parameters), _ints(net, 1, -1))

    maps = [_last(net, net.conv(image, 3, 1)), _last(net, net.conv(image, 3, 39, strides=[4, 4]))]
    return net.model(vector(195), net.node("Sigmoid", vector(1)), *maps, vector(117))


def hand_landmarks(net: Net) -> ModelProto:
    pooled = net.node("Flatten", net.node("GlobalAveragePool", net.conv(_first(net), 3, 8, strides=[8, 8])))
    vectors = [net.node("Gemm", pooled, net.weight(count, 8), transB=1) for count in (63, 1, 1, 63)]
    return net.model(vectors[0], *(net.node("Sigmoid", each) for each in vectors[1:3]), vectors[3])


def mobile_pose(net: Net) -> ModelProto:
    """PoseEstimationForMobile's: heatmaps at half the size, channels last."""
    scale = net.constant(np.array([1.0, 1.0, 4.0, 4.0], np.float32))
    maps = net.node("Resize", net.conv(_first(net), 3, 14, strides=[8, 8]), "", scale, mode="linear")
    return net.model(_last(net, maps))


def simple_baseline(net: Net) -> ModelProto:
    """MMPose's heatmaps of COCO's 17 key points, at a quarter of the size."""
    return net.model(_map(net, 4, 17))


def espnet(net: Net) -> ModelProto:
    """Class scores of a transposed convolution, at the size of the image."""
    return net.model(net.node("ConvTranspose", _map(net, 2, 8), net.weight(8, 12, 2, 2), strides=[2, 2]))


def paddle_text(net: Net) -> ModelProto:
    """PP-OCR's detector as Paddle2ONNX writes it: opset 12, and dimensions of -1 or named "?"."""
    deep = net.node("Relu", net.norm(net.conv("image", 3, 8, strides=[4, 4]), 8))
    for outputs in (8, 1):
        deep = net.node("ConvTranspose", deep, net.weight(8, outputs, 2, 2), net.weight(outputs), strides=[2, 2])
    model = net.model(net.node("Sigmoid", deep), opset=12)
    model.producer_name = "PaddlePaddle"
    for value in (model.graph.input[0], model.graph.output[0]):
        batch, _, height, width = value.type.tensor_type.shape.dim
        batch.dim_value = -1
        height.dim_param = width.dim_param = "?"
    return model


def torchvision_detector(net: Net) -> ModelProto:
    """Boxes, scores and labels of what is above a threshold, without a batch; the means are subtracted inside."""
    normed = net.node("Sub", net.node("Squeeze", "image", _ints(net, 0)), net.weight(3, 1, 1))
    maps = net.conv(net.node("Unsqueeze", normed, _ints(net, 0)), 3, 5, strides=[8, 8])
    rows = net.node("Squeeze", _rows(net, maps, 5), _ints(net, 0))
    boxes, scores = (
        net.node("Slice", rows, _ints(net, start), _ints(net, end), _ints(net, 1)) for start, end in ((0, 4), (4, 5))
    )
    flat = net.node("Reshape", scores, _ints(net, -1))
    chosen = net.node("NonZero", net.node("Greater", flat, net.constant(np.zeros(1, np.float32))))
    places = net.node("Reshape", chosen, _ints(net, -1))
    labels = net.node("Mod", places, _ints(net, 3))
    found = net.node("Gather", boxes, places), net.node("Sigmoid", net.node("Gather", flat, places)), labels
    names = "boxes", "scores", "labels"
    model = net.model(*(_named(net, each, name) for each, name in zip(found, names, strict=True)))
    del model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(name, kind, ["objects", *columns])
        for name, kind, columns in zip(names, (1, 1, 7), ([4], [], []), strict=True)
    )
    return model


def torchvision_aux(net: Net) -> ModelProto:
    """torchvision's FCN or DeepLabV3 trained with a second head: out and aux."""
    scale = net.constant(np.array([1.0, 1.0, 8.0, 8.0], np.float32))
    maps = [net.node("Resize", _map(net, 8, 21), "", scale, mode="linear") for _ in range(2)]
    return net.model(_named(net, maps[0], "out"), _named(net, maps[1], "aux"))


def depth(net: Net) -> ModelProto:
    """MiDaS' and Depth Anything's: never negative, and without an axis of channels."""
    return net.model(net.node("Squeeze", net.node("Relu", net.conv("image", 3, 1)), _ints(net, 1)))


def crowd_density(net: Net) -> ModelProto:
    """A coarse map whose sum is a number of people."""
    return net.model(net.node("Relu", _map(net, 8, 1)))


def unet(net: Net) -> ModelProto:
    """Pytorch-UNet's: one mask, not yet through a sigmoid."""
    whole = net.node("Relu", net.conv("image", 3, 4))
    half = net.node("Relu", net.conv(net.node("MaxPool", whole, kernel_shape=[2, 2], strides=[2, 2]), 4, 8))
    up = net.node("ConvTranspose", half, net.weight(8, 4, 2, 2), strides=[2, 2])
    return net.model(net.conv(_joined(net, [whole, up], 1), 8, 1))


def picture(net: Net) -> ModelProto:
    """A picture for a picture, as of super-resolution."""
    return net.model(net.conv("image", 3, 3))


def centres_and_logits(net: Net) -> ModelProto:
    """A DETR's outputs, of cells without attention."""
    return net.model(_rows(net, _map(net, 8, 20), 20), net.node("Sigmoid", _rows(net, _map(net, 8, 4), 4)))


def _queries(net: Net, strides: Sequence[int] = (8,)) -> str:
    """(1, cells, 8), by attention of each cell to all."""
    cells = _joined(net, [_rows(net, _map(net, stride, 8), 8) for stride in strides], 1)
    products = net.node("MatMul", cells, net.node("Transpose", cells, perm=[0, 2, 1]))
    return net.node("MatMul", net.node("Softmax", products, axis=2), cells)


def _best(net: Net, queries: str) -> str:
    return net.node("TopK", queries, _ints(net, 20), outputs=2, axis=1)


def _logits(net: Net, queries: str, classes: int) -> str:
    return net.node("MatMul", queries, net.weight(8, classes))


def _centres(net: Net, queries: str) -> str:
    return net.node("Sigmoid", net.node("MatMul", queries, net.weight(8, 4)))


def cells_with_attention(net: Net) -> ModelProto:
    """A YOLO that has attention and is cut off before its decoding: places of a grid, no queries."""
    cells = _queries(net, STRIDES)
    return net.model(_logits(net, cells, 20), net.node("MatMul", cells, net.weight(8, 4)))


def detr(net: Net) -> ModelProto:
    """transformers' export of the first DETR: the last logit says that there is no object."""
    queries = _queries(net)
    logits = _named(net, _logits(net, queries, CLASSES + 1), "logits")
    return net.model(logits, _named(net, _centres(net, queries), "pred_boxes"))


def rtdetr(net: Net) -> ModelProto:
    """transformers' export of RT-DETR and D-FINE: outputs are gathered from those of all layers."""
    queries = _best(net, _queries(net))
    layers = net.node("Unsqueeze", _centres(net, queries), _ints(net, 1))
    boxes = net.node("Gather", layers, net.constant(np.array(0)), axis=1)
    return net.model(_named(net, _logits(net, queries, CLASSES), "logits"), _named(net, boxes, "pred_boxes"))


def rf_detr(net: Net) -> ModelProto:
    queries = _best(net, _queries(net))
    centres, sides = (net.node("MatMul", queries, net.weight(8, 2)) for _ in range(2))
    boxes = [net.node("Add", centres, net.weight(1, 20, 2)), net.node("Mul", sides, net.weight(1, 20, 2))]
    return net.model(_named(net, _joined(net, boxes, 2), "dets"), _named(net, _logits(net, queries, CLASSES), "labels"))


def deformable_detr(net: Net) -> ModelProto:
    grid = net.constant(net.rng.uniform(-1, 1, (1, 2, 4, 2)).astype(np.float32))
    sampled = net.node("Reshape", net.node("GridSample", _map(net, 8, 1), grid), _ints(net, 1, 1, 8))
    cells = net.node("Add", _queries(net), sampled)
    logits = _named(net, _logits(net, cells, CLASSES), "logits")
    return net.model(logits, _named(net, _centres(net, cells), "pred_boxes"), opset=16)


def rtdetr_rows(net: Net) -> ModelProto:
    """Ultralytics' RT-DETR: (1, 20, 6) cx cy w h score class."""
    queries = _best(net, _queries(net))
    scores = net.node("Sigmoid", _logits(net, queries, CLASSES))
    best = net.node("ReduceMax", scores, axes=[2], keepdims=1)
    classes = net.node("Cast", net.node("ArgMax", scores, axis=2, keepdims=1), to=TensorProto.FLOAT)
    return net.model(_joined(net, [_centres(net, queries), best, classes], 2))


def rtdetr_older_rows(net: Net) -> ModelProto:
    """The same from older versions: (1, 20, 4 + classes)."""
    queries = _best(net, _queries(net))
    return net.model(_joined(net, [_centres(net, queries), net.node("Sigmoid", _logits(net, queries, CLASSES))], 2))


def rtdetr_deployed(net: Net) -> ModelProto:
    """The projects' own export of RT-DETR and D-FINE: boxes in pixels of a picture, whose size is a second input."""
    queries = _best(net, _queries(net))
    scores = net.node("Sigmoid", _logits(net, queries, CLASSES))
    centres, sides = (net.node("Sigmoid", net.node("MatMul", queries, net.weight(8, 2))) for _ in range(2))
    half = _times(net, sides, 0.5)
    shares = _joined(net, [net.node("Sub", centres, half), net.node("Add", centres, half)], 2)
    sizes = net.node("Tile", "orig_target_sizes", _ints(net, 1, 2))
    pixels = net.node("Cast", net.node("Unsqueeze", sizes, _ints(net, 1)), to=TensorProto.FLOAT)
    _named(net, net.node("Mul", shares, pixels), "boxes")
    _named(net, net.node("ArgMax", scores, axis=2, keepdims=0), "labels")
    model = net.model(_named(net, net.node("ReduceMax", scores, axes=[2], keepdims=0), "scores"))
    batch = net.shape[0]
    model.graph.input.append(helper.make_tensor_value_info("orig_target_sizes", TensorProto.INT64, [batch, 2]))
    for name, kind, shape in (("boxes", TensorProto.FLOAT, [20, 4]), ("labels", TensorProto.INT64, [20])):
        model.graph.output.append(helper.make_tensor_value_info(name, kind, [batch, *shape]))
    return model


def regression(net: Net) -> ModelProto:
    return net.model(net.node("Gemm", _pooled(net), net.weight(1, 8), transB=1))


Family = Callable[[Net], ModelProto]
DETECTORS: dict[Family, str] = {
    yolox: "yolox",
    yolox_decoded: "yolov5",
    yolov5: "yolov5",
    yolov8: "yolov8",
    end2end: "end2end",
    detr: "detr",
    rtdetr: "rtdetr",
    rf_detr: "rtdetr",
    deformable_detr: "rtdetr",
    ssd: "ssd",
    fastestdet: "fastestdet",
    nanodet: "nanodet",
    nanodet_plus: "nanodet-plus",
    nanodet_by_stride: "nanodet",
    yunet: "yunet",
}
# By Ultralytics' name of the task: ours, and the decoder.
ULTRALYTICS: dict[Family, tuple[str, str, str]] = {
    yolov8_seg: ("segment", "instance", "yolov8"),
    yolo26_seg: ("segment", "instance", "end2end"),
    yolov8_pose: ("pose", "pose", "yolov8"),
    yolo26_pose: ("pose", "pose", "end2end"),
    yolov8_obb: ("obb", "obb", "yolov8"),
    yolo26_obb: ("obb", "obb", "end2end"),
}
CLASSIFIERS: tuple[Family, ...] = (classifier, softmax_classifier, squeezed_classifier, squeezed_softmax)
SEGMENTERS: tuple[Family, ...] = (segmentation, segmentation_argmax, one_mask)
_ZERO_TO_ONE = {"color": "rgb", "resize": "stretch", "scale": 1 / 255}
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_CROP = {"resize": "letterbox", "anchor": "center", "pad": 0}
_LAST = (1, 64, 96, 3)
# The shape of the image, the keys of the spec, and of its input.
OF_PROJECTS: dict[Family, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
    mediapipe_mask: (_LAST, {"task": "segment", "score_threshold": 0.5}, _ZERO_TO_ONE),
    blazepose: (_LAST, {"task": "pose", "decoder": "landmarks", "keypoints": 39}, {**_ZERO_TO_ONE, **_CROP}),
    hand_landmarks: (_LAST, {"task": "pose", "decoder": "landmarks", "keypoints": 21}, {**_ZERO_TO_ONE, **_CROP}),
    mobile_pose: (_LAST, {"task": "pose", "decoder": "heatmaps", "keypoints": 14}, {"color": "bgr", **_CROP}),
    simple_baseline: (
        IMAGE,
        {"task": "pose", "decoder": "heatmaps", "keypoints": 17},
        {**_ZERO_TO_ONE, **_IMAGENET, **_CROP},
    ),
    espnet: (IMAGE, {"task": "segment"}, {**_ZERO_TO_ONE, **_IMAGENET}),
    paddle_text: (
        (1, 3, "height", "width"),
        {"task": "obb", "decoder": "dbnet", "labels": ("text",)},
        {**_ZERO_TO_ONE, **_IMAGENET, "color": "bgr", "resize": "nearest", "multiple": 32},
    ),
    torchvision_detector: (IMAGE, {"task": "detect", "decoder": "torchvision"}, _ZERO_TO_ONE),
    torchvision_aux: (IMAGE, {"task": "segment"}, {**_ZERO_TO_ONE, **_IMAGENET}),
    depth: (IMAGE, {"task": "depth", "depth": "disparity"}, {**_ZERO_TO_ONE, **_IMAGENET}),
    unet: (IMAGE, {"task": "segment", "score_threshold": 0.0}, _ZERO_TO_ONE),
}
OTHERS: tuple[Family, ...] = (
    picture,
    crowd_density,
    centres_and_logits,
    cells_with_attention,
    regression,
    yolov8_undecoded,
)


def family(make: Family, shape: Shape = IMAGE) -> ModelProto:
    """A graph of a family, for an image of a shape, which may be open."""
    return make(Net(shape))
