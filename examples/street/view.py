"""Where things stand in the street, and the pinhole camera that looks at it.

World axes in metres: X along the street (to the right), Y up from the road, Z across the street, away from
the camera. The camera never moves: it hangs over the near pavement and looks across the street, turned a
little to the right.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

WIDTH_PX, HEIGHT_PX = 480, 272
FPS = 10

NEAR_KERB_Z, CENTRE_LINE_Z, FAR_KERB_Z, FACADE_Z = 9.0, 12.2, 15.4, 18.0
# Feet, wheels and lamp posts outside this stretch of X can not be seen by the camera.
SEEN_X = (-10.0, 33.0)
# Lamp heads as (X, Y, Z) in metres: one row on the far kerb, in view, and one on the near kerb, above the
# frame.
LAMP_HEADS: Array = np.array(
    [(0.5, 6.2, 15.0), (15.5, 6.2, 15.0), (30.5, 6.2, 15.0), (8.0, 6.2, 9.4), (23.0, 6.2, 9.4)]
)
FAR_POSTS_X = (0.5, 15.5, 30.5)
NEAR_POST_X = 8.0

_CAMERA_HEIGHT_M = 4.5
_FOCAL_PX = 330.0
_CENTRE_PX: Array = np.array((WIDTH_PX / 2, HEIGHT_PX / 2))
_YAW, _PITCH = math.radians(20.0), math.radians(7.0)
_SIN_YAW, _COS_YAW = math.sin(_YAW), math.cos(_YAW)
_SIN_PITCH, _COS_PITCH = math.sin(_PITCH), math.cos(_PITCH)
_NEAREST_M = 0.5
# Where the camera stands, and the level direction that runs to the right in its image.
EYE: Array = np.array((0.0, _CAMERA_HEIGHT_M, 0.0))
IMAGE_RIGHT: Array = np.array((_COS_YAW, 0.0, -_SIN_YAW))
# The image's right and down and the viewing direction, as rows, in world axes.
_AXES: Array = np.array(
    [
        IMAGE_RIGHT,
        (-_SIN_YAW * _SIN_PITCH, -_COS_PITCH, -_COS_YAW * _SIN_PITCH),
        (_SIN_YAW * _COS_PITCH, -_SIN_PITCH, _COS_YAW * _COS_PITCH),
    ]
)


def project(points: Array) -> Array:
    """Image positions (n, 2) in pixels of world points (n, 3) in metres in front of the camera."""
    seen = (points - EYE) @ _AXES.T
    pixels = seen[:, :2] * (_FOCAL_PX / np.maximum(seen[:, 2:], _NEAREST_M)) + _CENTRE_PX
    return np.asarray(pixels, dtype=np.float64)


def depth(points: Array) -> Array:
    """Distance (n,) in metres of world points (n, 3), along the viewing direction."""
    return np.asarray((points - EYE) @ _AXES[2], dtype=np.float64)


def ground_and_facade(samples_per_px: int) -> tuple[Array, Array, Array, Array]:
    """Where the ray of every pixel meets the road plane and the plane of the far house fronts.

    Returns ground X, ground Z, facade X and facade Y, each (rows, columns) in metres with `samples_per_px`
    rays to a pixel side; the ground coordinates are infinite where the ray rises above the horizon.
    """
    columns = (np.arange(WIDTH_PX * samples_per_px) + 0.5) / samples_per_px
    rows = (np.arange(HEIGHT_PX * samples_per_px) + 0.5) / samples_per_px
    across, down = np.meshgrid((columns - _CENTRE_PX[0]) / _FOCAL_PX, (rows - _CENTRE_PX[1]) / _FOCAL_PX)
    level = _COS_PITCH - down * _SIN_PITCH
    fall = _SIN_PITCH + down * _COS_PITCH
    step_x = across * _COS_YAW + level * _SIN_YAW
    step_z = level * _COS_YAW - across * _SIN_YAW
    to_ground = np.divide(_CAMERA_HEIGHT_M, fall, out=np.full_like(fall, np.inf), where=fall > 1e-6)
    to_facade = FACADE_Z / step_z
    with np.errstate(invalid="ignore"):
        ground_x, ground_z = to_ground * step_x, to_ground * step_z
    return ground_x, ground_z, to_facade * step_x, _CAMERA_HEIGHT_M - to_facade * fall
