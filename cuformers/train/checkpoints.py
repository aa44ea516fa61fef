"""Checkpoint folders: written whole or not at all, told from damaged ones by a manifest, and thinned out."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from cuformers.base.errors import CheckpointError
from cuformers.base.log import notice
from cuformers.checkpoint.atomic import json_bytes, scratch_folder, sync_folder, write_synced

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_BLOCK = 1 << 22
Writer = Callable[[Path], None]
"""Fills a new folder."""


def folder_name(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"checkpoint-{step}"


def write_checkpoint(output_dir: Path, step: int, write: Writer, nbytes: int) -> Path:
    """Makes checkpoint-`step` of what `write` puts into a folder; returns it.

    All is written beside the others under another name, synced, listed in manifest.json with its size and SHA-256, and
    renamed at the end: what is killed on the way leaves no checkpoint-N, and an earlier one of the same step as it was.

    Args:
        nbytes: what it will take on the disk, roughly.

    Raises:
        OSError: the disk is full or can't be written to; nothing of it is left then.
    """
    target = output_dir / folder_name(step)
    with scratch_folder(output_dir, nbytes) as scratch:
        made = scratch / target.name
        made.mkdir()
        write(made)
        write_synced(made / MANIFEST, json_bytes({"files": _listed(made)}))
        sync_folder(made)
        if target.exists():
            os.replace(target, scratch / "replaced")
        os.replace(made, target)
        sync_folder(output_dir)
    return target


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None where it is complete. One without manifest must have a trainer's state."""
    if not (folder / STATE).is_file():
        return f"it has no {STATE}"
    if not (folder / MANIFEST).is_file():
        return None
    try:
        files: Mapping[str, Mapping[str, object]] = json.loads((folder / MANIFEST).read_text())["files"]
        for name, listed in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != listed["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {listed['bytes']}"
            if _sha256(path) != listed["sha256"]:
                return f"{name} is not what was written"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read ({error})"
    return None


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders checkpoint-N, the lowest N first."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """N of checkpoint-N."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def newest(output_dir: Path) -> Path:
    """The checkpoint with the highest step that is complete; each damaged one above it gets a notice.

    Raises:
        CheckpointError: there is none.
    """
    for folder in reversed(checkpoints(output_dir)):
        reason = damage(folder)
        if reason is None:
            return folder
        notice(f"{folder} is passed over: {reason}.")
    raise CheckpointError(f"{output_dir} has no complete checkpoint to resume from: start with train() instead.")


def thin_out(output_dir: Path, limit: int | None, keep: set[Path]) -> None:
    """Deletes the oldest checkpoints above `limit`, none of those to keep."""
    if limit is None:
        return
    by_age = sorted(checkpoints(output_dir), key=lambda path: (path.stat().st_mtime_ns, step_of(path)))
    kept = {path.resolve() for path in keep}
    loose = [path for path in by_age if path.resolve() not in kept]
    for path in loose[: max(0, len(by_age) - limit)]:
        shutil.rmtree(path)


def _listed(folder: Path) -> dict[str, dict[str, object]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    listed: dict[str, dict[str, object]] = {}
    for path in paths:
        _sync(path)
        listed[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return listed


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
