"""Read the labels of a text detector in MMOCR's JSON, as a COCO document."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

_Text = Annotated[str, Field(min_length=1, max_length=1024)]


class _Part(BaseModel):
    """Values have JSON's own types and are finite; keys that nobody here reads are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _Instance(_Part):
    """A word or a line. ignore: nobody could read it, so that finding it is no mistake."""

    polygon: list[float]
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)]
    bbox_label: int
    ignore: bool = False


class _Image(_Part):
    img_path: _Text
    height: int
    width: int
    instances: Annotated[list[_Instance], FailFast()]


class _Category(_Part):
    id: int
    name: _Text


class _About(_Part):
    category: Annotated[list[_Category], FailFast()]


class _Labels(_Part):
    metainfo: _About
    data_list: Annotated[list[_Image], FailFast()]


def coco_document(text: str) -> dict[str, Any]:
    """Return the COCO document that says what MMOCR's JSON does: what it ignores is a crowd.

    An image is known by its file's name alone: paths in such files are those of MMOCR's own folders. Raises
    pydantic's ValidationError for any other text.
    """
    labels = _Labels.model_validate_json(text)
    return {
        "images": [
            {"id": number, "file_name": PurePosixPath(each.img_path).name, "width": each.width, "height": each.height}
            for number, each in enumerate(labels.data_list)
        ],
        "categories": [each.model_dump() for each in labels.metainfo.category],
        "annotations": [
            {
                "image_id": number,
                "category_id": each.bbox_label,
                "bbox": [left, top, right - left, bottom - top],
                "iscrowd": int(each.ignore),
                "segmentation": [each.polygon],
            }
            for number, image in enumerate(labels.data_list)
            for each in image.instances
            for left, top, right, bottom in [each.bbox]
        ],
    }
