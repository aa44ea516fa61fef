"""Files that hold one JSON value, most of them an object."""

import json
from pathlib import Path
from typing import Any

from cuformers.base.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it can't be read, is no valid JSON, or no object.
    """
    value = read_json_value(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, and holds a {type(value).__name__}.")
    return value


def read_json_value(file: Path) -> Any:
    """What a file holds; raises CheckpointError where it can't be read or is no valid JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{file} can't be read, it is not valid JSON: {error}. Fetch it again.") from error
