"""Define the shape of every error that a user of tared can meet.

A message states what was found, what was expected, and the remedy; `code` is stable, so that programs
(and the fleet) can act on it while the wording improves.
"""

from __future__ import annotations


def install_extra(name: str) -> str:
    """Return the remedy for a missing optional dependency: the extra of pyproject.toml that brings it.

    No package index has tared, so it is installed from a checkout.

    Args:
        name: A key of pyproject.toml's `optional-dependencies`.

    >>> install_extra("plot")
    "pip install '.[plot]' in a checkout of tared"
    """
    return f"pip install '.[{name}]' in a checkout of tared"


class TaredError(Exception):
    """Base of all expected errors: caught once per job, printed as one line, exit code 2.

    Args:
        code: Stable name, `area.cause`, which programs and the fleet may act on.
        found: The thing that is wrong. This and the next two are sentence fragments without a full stop.
        expected: The thing that would be right.
        remedy: An action of the reader that cures it.

    >>> print(TaredError("file.missing", "no file a.onnx", "an ONNX model", "check the path"))
    file.missing: no file a.onnx; expected an ONNX model; check the path
    """

    def __init__(self, code: str, found: str, expected: str, remedy: str) -> None:
        super().__init__(code, found, expected, remedy)  # all four, so that pickling across processes works
        self.code = code
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def as_dict(self) -> dict[str, str]:
        """Return `code`, `found`, `expected` and `remedy`, as the commands' `--json` prints them."""
        return {"code": self.code, "found": self.found, "expected": self.expected, "remedy": self.remedy}

    def __str__(self) -> str:
        return f"{self.code}: {self.found}; expected {self.expected}; {self.remedy}"


class CalibrationError(TaredError):
    """The numbers cannot be calibrated: nothing observed, non-finite activations, another model's histograms.

    >>> from calibrate.scale import activation_scale
    >>> try:
    ...     activation_scale(float("nan"), "conv1")
    ... except CalibrationError as error:
    ...     print(error.code)
    scale.amax
    """
