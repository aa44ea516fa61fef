"""The files of a tokenizer, read into one record: tokenizer.json, its config, special tokens, chat templates."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.json_file import read_json
from cuformers.checkpoint.resolve import local_folder, resolve_file, resolve_folder

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
PATTERNS = (
    TOKENIZER,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "chat_template.*",
    f"{MORE_TEMPLATES}/*.jinja",
)
_OLDER_FORMATS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files of a tokenizer say, before any option of the caller's."""

    name: str
    """The folder or hub id."""
    rust: RustTokenizer
    """The tokenizer of tokenizer.json, untouched."""
    config: dict[str, Any]
    """tokenizer_config.json, with special_tokens_map.json merged in where Transformers does so."""
    model_config: dict[str, Any]
    """config.json of the model beside it; {} where there is none."""
    added_tokens: dict[int, AddedToken]
    """Tokens that the files beside tokenizer.json add, by id."""
    chat_template: str | dict[str, str] | None
    """The chat template, or several by name."""


def read_files(name_or_path: str | Path, **where: Any) -> TokenizerFiles:
    """Reads a tokenizer's files. `where`: revision, token, cache_dir, local_files_only, subfolder.

    Raises CheckpointError, with the remedy, where there is no tokenizer.json or a file can't be parsed.
    """
    folder = resolve_folder(name_or_path, patterns=PATTERNS, **where)
    path = folder / TOKENIZER
    if not path.is_file():
        raise _no_tokenizer_json(name_or_path, where)
    config = _read(folder / CONFIG)
    added = _added_tokens(folder, config)
    return TokenizerFiles(
        name=str(name_or_path),
        rust=_read_rust(path),
        config=config,
        model_config=_read(folder / "config.json"),
        added_tokens=added,
        chat_template=_chat_template(folder, config),
    )


def as_token(value: Any, where: str) -> str | AddedToken:
    """A token as the files spell it: a string, or a dict of its properties."""
    if isinstance(value, (str, AddedToken)):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        return AddedToken(**{name: value[name] for name in known if name in value})
    raise CheckpointError(f"{where} holds {value!r}: a token is a string, or a dict with its text under 'content'.")


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    return read_json(path) if path.is_file() else {}


def _read_rust(path: Path) -> RustTokenizer:
    try:
        return RustTokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        if type(error) is not Exception and not isinstance(error, (OSError, ValueError)):
            raise
        raise CheckpointError(
            f"{path} is no tokenizer that the tokenizers library can read: {error}. Fetch the file again, or upgrade "
            "with: pip install -U tokenizers"
        ) from error


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Tokens added by tokenizer_config.json or, in older folders, added_tokens.json.

    Those older folders' special_tokens_map.json is merged into `config`, over what stands there.
    """
    listed = config.pop("added_tokens_decoder", None)
    if listed is not None:
        return {int(i): _added(value, CONFIG) for i, value in listed.items()}
    for name, value in _read(folder / "special_tokens_map.json").items():
        if isinstance(value, dict) and "content" in value:
            value = as_token({**value, "special": True}, "special_tokens_map.json")
        config[name] = value
    special = {str(as_token(v, CONFIG)) for k, v in config.items() if k.endswith("_token") and _is_token(v)}
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(name), list):
            special.update(str(as_token(token, CONFIG)) for token in config[name])
    ids = _read(folder / "added_tokens.json")
    return {i: AddedToken(text, normalized=text not in special, special=text in special) for text, i in ids.items()}


def _is_token(value: Any) -> bool:
    return isinstance(value, (str, AddedToken)) or (isinstance(value, dict) and "content" in value)


def _added(value: Any, where: str) -> AddedToken:
    token = as_token(value, where)
    return AddedToken(token) if isinstance(token, str) else token


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Template files first, then tokenizer_config.json, then a processor's chat_template.json."""
    named = {}
    if (folder / TEMPLATE).is_file():
        named["default"] = (folder / TEMPLATE).read_text(encoding="utf-8")
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    inside = config.pop("chat_template", None)
    if named:
        return named["default"] if list(named) == ["default"] else named
    if inside is None:
        inside = _read(folder / "chat_template.json").get("chat_template")
    if isinstance(inside, list):
        return {entry["name"]: entry["template"] for entry in inside}
    return inside


def _no_tokenizer_json(name_or_path: str | Path, where: dict[str, Any]) -> CheckpointError:
    older = [name for name in _OLDER_FORMATS if resolve_file(name_or_path, name, **where) is not None]
    if not older:
        is_local = local_folder(name_or_path) is not None
        remedy = "Copy it there, or name the folder that has it." if is_local else "Check the id and subfolder."
        return CheckpointError(f"{name_or_path} has no tokenizer.json. {remedy}")
    return CheckpointError(
        f"{name_or_path} has no tokenizer.json, only the older {older[0]}. Convert it once (needs: pip install "
        "transformers sentencepiece tiktoken protobuf) and load the new folder:\n"
        f'  python -c "from transformers import AutoTokenizer as A; A.from_pretrained({str(name_or_path)!r})'
        ".save_pretrained('converted')\""
    )
