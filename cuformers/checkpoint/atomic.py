"""Files that are whole or not there: written under another name in the same folder, synced, then renamed."""

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cuformers.cuda.memory import human

_PREFIX = ".saving-"


@contextmanager
def scratch_folder(folder: Path, needed: int) -> Iterator[Path]:
    """A temporary folder inside `folder` (made where absent) for `needed` bytes; gone at the end whatever happens.

    Raises OSError with the path: no permission, not a folder, or too little space, with needed and available bytes.
    What killed processes of this host left behind is removed first.
    """
    made_here, scratch = not folder.exists(), None
    try:
        with explained(folder, needed):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_orphans(folder)
            check_space(folder, needed)
            scratch = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-", dir=folder))
            yield scratch
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        if made_here and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def check_space(folder: Path, needed: int) -> None:
    """Raises OSError(ENOSPC) where the disk of `folder` has less than `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextmanager
def explained(folder: Path, needed: int) -> Iterator[None]:
    """Errors of the file system that leave it say what they mean for a save into `folder`."""
    try:
        yield
    except OSError as error:
        path = str(error.filename or folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            available = human(shutil.disk_usage(folder).free) if folder.exists() else "unknown"
            text = (
                f"{os.strerror(error.errno)}: the save needs {human(needed)} ({needed} bytes), the disk has "
                f"{available}. Nothing of it was kept; free space or save elsewhere"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{os.strerror(error.errno)}: can't write there; choose a folder that this user may write to"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR):
            text = "it, or a part of its path, is a file; name a folder to save into"
        else:
            raise
        raise OSError(error.errno, text, path) from error


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file and waits until the disk has it."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the folder's names."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def json_bytes(obj: object, *, sort_keys: bool = False) -> bytes:
    """JSON as Hugging Face writes it: two spaces, a final newline. Raises ValueError for NaN and infinities."""
    text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    return (text + "\n").encode()


def write_json_atomic(path: str | Path, obj: object, *, sort_keys: bool = False) -> None:
    """Replaces `path` by the JSON of `obj`, whole or not at all.

    Raises ValueError where `obj` has no JSON, OSError with the path where it can't be written.
    """
    path = Path(path)
    try:
        data = json_bytes(obj, sort_keys=sort_keys)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} can't be written: its content has no JSON form ({error}).") from error
    write_bytes_atomic(path, data)


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Replaces `path` by a file with these bytes, whole or not at all; OSError with the path where it can't be."""
    path = Path(path)
    with scratch_folder(path.parent, len(data)) as scratch:
        write_synced(scratch / path.name, data)
        os.replace(scratch / path.name, path)
        sync_folder(path.parent)


def _remove_orphans(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}{socket.gethostname()}-*"):
        pid = path.name.rsplit("-", 2)[-2]
        if pid.isdecimal() and not Path("/proc", pid).exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
