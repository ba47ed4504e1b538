"""Read YAML files into strict pydantic schemas; all errors of a file are reported at once, one per line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from agent.common.bounded_yaml import YamlError, load_yaml
from agent.common.errors import ConfigError
from agent.common.redaction import redact, redact_location
from engines.store.files import read_text

Finite = Annotated[float, Field(allow_inf_nan=False)]
OPTIONAL_TEXT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}  # a JSON Schema


def in_folder(path: Path, info: ValidationInfo) -> Path:
    """Return the path, taken from the file's folder as `validate` knows it if it is relative."""
    return Path((info.context or {}).get("folder", "")) / path


LocalPath = Annotated[Path, AfterValidator(in_folder)]


class Strict(BaseModel):
    """A frozen schema that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SchemaT = TypeVar("SchemaT", bound=BaseModel)

_MOST_BYTES = 1 << 20  # size of a YAML file
_VERBATIM = "stated"

# pydantic's message types, in the words of a config file; anything else keeps pydantic's own message.
_EXPECTED = {
    "int_type": "integer",
    "int_parsing": "integer",
    "int_from_float": "integer",
    "float_type": "number",
    "float_parsing": "number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file.

    Raises ConfigError:
        config.missing     there is no such file
        config.unreadable  the file cannot be read, is not YAML as `load_yaml` takes it, or is no mapping
    """
    try:
        content = load_yaml(read_text(path, _MOST_BYTES))
    except FileNotFoundError:
        raise ConfigError(
            "config.missing", f"no file {path}", "a YAML file", "check the path, or let 'tared init' write one"
        ) from None
    except (OSError, UnicodeDecodeError, YamlError) as error:
        detail = redact(" ".join(str(error).split()))  # quotes the file
        raise ConfigError("config.unreadable", f"{path}: {detail}", "valid YAML", "correct the file") from error
    if not isinstance(content, Mapping):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise ConfigError("config.unreadable", f"{path} holds {found}", "keys and values", "correct the file")
    return content


def validate(schema: type[SchemaT], content: Mapping[str, Any], source: str, folder: Path | None = None) -> SchemaT:
    """Build a schema from plain data.

    Args:
        source: The file, for errors.
        folder: Relative paths are taken from it; None: they stay relative.

    Raises ConfigError: `config.invalid`  lists every error, one per line.
    """
    try:
        return schema.model_validate(content, context={"folder": folder or ""})
    except ValidationError as error:
        raise invalid([redact(_error_line(detail)) for detail in error.errors()], source) from error


def invalid(lines: Sequence[str], source: str) -> ConfigError:
    """Return the error that lists the errors of a file."""
    return ConfigError(
        "config.invalid",
        f"{len(lines)} error{'s' if len(lines) > 1 else ''} in {source}:\n  " + "\n  ".join(lines) + "\n",
        "the keys and values that 'tared config --example' shows",
        "correct each line named above",
    )


def verbatim_error(error: str) -> PydanticCustomError:
    """Return a validator's error whose text is shown alone, without the value, which may hold a password."""
    return PydanticCustomError(_VERBATIM, "{error}", {"error": error})


def _error_line(detail: ErrorDetails) -> str:
    """Return one error as `camera.fps: expected integer, got 'fast'`."""
    where = ".".join(str(part) for part in detail["loc"]) or "(top level)"
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    if detail["type"] == "missing":
        return f"{where}: missing"
    if detail["type"] == _VERBATIM:
        return f"{where}: {detail['msg']}"
    expected = _EXPECTED.get(detail["type"], "").format_map(detail.get("ctx", {}))
    if not expected:
        message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        expected = message[:1].lower() + message[1:]
    found = detail["input"]
    return f"{where}: expected {expected}, got {redact_location(found) if isinstance(found, str) else found!r}"
