"""The model that ships inside the package, for when the user names none."""

from pathlib import Path

from cuformers.base.errors import CheckpointError

_FOLDER = Path(__file__).resolve().parent.parent / "builtin" / "stories"


def builtin_folder() -> Path:
    """The checkpoint folder of the built-in model, a small one that tells stories.

    Raises:
        CheckpointError: this installation lacks it.
    """
    if not (_FOLDER / "config.json").is_file():
        raise CheckpointError(
            f"the built-in model is not in {_FOLDER}: install cuformers again, or name a model (a folder or a hub id)."
        )
    return _FOLDER
