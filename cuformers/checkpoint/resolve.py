"""Where a checkpoint lies: a local folder, or a Hugging Face hub id fetched into huggingface_hub's cache."""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TypeVar

from cuformers.base import env
from cuformers.base.errors import CheckpointError, bad_argument

CONFIG_PATTERNS = ("*.json",)
TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "additional_chat_templates/*",
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_T = TypeVar("_T")


def folder_patterns(variant: str | None = None) -> tuple[str, ...]:
    """Files that make a checkpoint: configuration, tokenizer, and the weights of one variant."""
    dot = f".{variant}" if variant else ""
    return (*CONFIG_PATTERNS, *TOKENIZER_PATTERNS, f"model{dot}.safetensors", f"model{dot}-*.safetensors")


FOLDER_PATTERNS = folder_patterns()


def looks_like_path(name: str) -> bool:
    """True for a name that can only be meant as a local path: `./x`, `~/x`, `/x`, `a/b/c`, `x/`."""
    return _HUB_ID.fullmatch(name) is None


def local_folder(name_or_path: str | Path, *, revision: str | None = None, subfolder: str = "") -> Path | None:
    """The folder, where `name_or_path` is a local one; None where it is a hub id.

    Raises CheckpointError for a path that does not exist or is a file, ValueError for a revision of a local folder.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise bad_argument("name_or_path", name_or_path, "a local folder, or a hub id such as 'Qwen/Qwen3-0.6B'")
    path = Path(name_or_path).expanduser()
    try:
        kind = "folder" if path.is_dir() else "file" if path.exists() else ""
    except PermissionError as error:
        raise _unreadable(path) from error
    if kind == "folder":
        if revision not in (None, "main"):
            raise bad_argument("revision", revision, f"None, as {path} is a local folder", "Name the hub id instead.")
        inside = path / subfolder
        if not inside.is_dir():
            raise CheckpointError(f"{path} has no folder {subfolder!r}: it has {_listing(path)}.")
        return inside
    if kind == "file":
        raise CheckpointError(f"{path} is a file: name the folder that holds config.json and model.safetensors.")
    if isinstance(name_or_path, Path) or looks_like_path(str(name_or_path)):
        raise CheckpointError(
            f"{path} does not exist (looked at {path.absolute()}). Name an existing folder, or a hub id such as "
            "'Qwen/Qwen3-0.6B'."
        )
    return None


def resolve_file(
    name_or_path: str | Path,
    filename: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
) -> Path | None:
    """One file of a checkpoint, fetched from the hub where needed; None where the checkpoint has no such file.

    Offline (`local_files_only` or HF_HUB_OFFLINE=1) None also means: not in the cache, though the checkpoint is.
    Raises CheckpointError where the checkpoint itself can't be reached, with the remedy.
    """
    folder = local_folder(name_or_path, revision=revision, subfolder=subfolder)
    if folder is not None:
        file = folder / filename
        return file if file.is_file() else None

    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repo = str(name_or_path)

    def fetch() -> Path | None:
        try:
            return Path(
                hub.hf_hub_download(
                    repo,
                    filename,
                    subfolder=subfolder or None,
                    revision=revision,
                    token=token,
                    cache_dir=cache_dir,
                    local_files_only=local_files_only,
                )
            )
        except LocalEntryNotFoundError:
            if (local_files_only or _offline()) and _is_cached(repo, revision, cache_dir):
                return None
            raise
        except EntryNotFoundError:
            return None

    return _explained(repo, revision, fetch)


def require_file(
    name_or_path: str | Path,
    filename: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
) -> Path:
    """`resolve_file`, but a file that is not there is a CheckpointError."""
    file = resolve_file(
        name_or_path,
        filename,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        subfolder=subfolder,
    )
    if file is not None:
        return file
    folder = local_folder(name_or_path, subfolder=subfolder)
    if folder is not None:
        raise CheckpointError(f"{folder} has no {filename}: it has {_listing(folder)}.")
    where = "the local cache, and fetching is switched off" if local_files_only or _offline() else "the hub"
    raise CheckpointError(f"{name_or_path}: no file {str(PurePosixPath(subfolder, filename))!r} in {where}.")


def resolve_folder(
    name_or_path: str | Path,
    *,
    patterns: Sequence[str] = FOLDER_PATTERNS,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
) -> Path:
    """The folder of a checkpoint with all its files matching `patterns` (relative to `subfolder`), fetched if needed.

    Pickle files are never fetched. Raises CheckpointError, with the remedy, for what can't be reached.
    """
    refused = [p for p in patterns if p.endswith(PICKLES)]
    if refused:
        raise bad_argument("patterns", refused, "safetensors, json and tokenizer files", "Pickles run code when read.")
    folder = local_folder(name_or_path, revision=revision, subfolder=subfolder)
    if folder is not None:
        return folder

    import huggingface_hub as hub

    repo, wanted = str(name_or_path), [str(PurePosixPath(subfolder, p)) for p in patterns]

    def fetch() -> Path:
        root = hub.snapshot_download(
            repo,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=wanted,
            ignore_patterns=[f"*{suffix}" for suffix in PICKLES],
        )
        return Path(root)

    root = _explained(repo, revision, fetch)
    if not (root / subfolder).is_dir():
        raise CheckpointError(f"{repo}: no files matching {list(patterns)} in its folder {subfolder!r}.")
    return root / subfolder


def _explained(repo: str, revision: str | None, fetch: Callable[[], _T]) -> _T:
    """What `fetch` returns; the hub's failures become CheckpointErrors that name the remedy."""
    from huggingface_hub import errors

    at = f"{repo} at revision {revision!r}" if revision else repo
    try:
        return fetch()
    except errors.GatedRepoError as error:
        text = f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then pass token= or set HF_TOKEN."
        cause: Exception = error
    except errors.RepositoryNotFoundError as error:
        text = (
            f"{repo} is neither a local folder (looked at {Path(repo).absolute()}) nor a repository on the hub that "
            "this token may see. Check the spelling; for a private repository pass token= or set HF_TOKEN."
        )
        cause = error
    except errors.RevisionNotFoundError as error:
        text, cause = f"{repo} has no revision {revision!r}: name one of its branches, tags or commits.", error
    except errors.LocalEntryNotFoundError as error:
        text = f"{at} is not (completely) in the local cache and the hub was not reached: {_first_line(error)} "
        text += "Connect, unset HF_HUB_OFFLINE, pass local_files_only=False, or name a local folder."
        cause = error
    except (errors.OfflineModeIsEnabled, http_client().TransportError, ConnectionError) as error:
        text = f"{at} can't be fetched, the hub was not reached: {_first_line(error)} "
        text += "Connect, or name a local folder."
        cause = error
    except errors.HFValidationError as error:
        text, cause = f"{repo!r} is neither a local folder nor a valid hub id: {_first_line(error)}", error
    except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError, errors.FileMetadataError) as error:
        text, cause = f"{at} can't be fetched: {_first_line(error)}", error
    except PermissionError as error:
        raise _unreadable(error.filename or "the hub's cache") from error
    raise CheckpointError(text) from cause


def http_client() -> ModuleType:
    """The HTTP library that the installed huggingface_hub raises the errors of: httpx, or httpx2 from 2.0 on."""
    import huggingface_hub

    major = int(huggingface_hub.__version__.split(".")[0])
    return import_module("httpx" if major < 2 else "httpx2")


def _is_cached(repo: str, revision: str | None, cache_dir: str | Path | None) -> bool:
    import huggingface_hub as hub

    try:
        found = hub.snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=["config.json"]
        )
    except hub.errors.LocalEntryNotFoundError:
        return False
    return Path(found).is_dir()


def _offline() -> bool:
    import huggingface_hub as hub

    return bool(hub.constants.HF_HUB_OFFLINE) or env.flag("HF_HUB_OFFLINE")


def _unreadable(path: object) -> CheckpointError:
    return CheckpointError(f"{path} can't be read: permission denied. Give this user read access to it.")


def _listing(folder: Path, most: int = 12) -> str:
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
