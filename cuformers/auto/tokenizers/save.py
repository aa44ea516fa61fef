"""Writing a tokenizer's folder: tokenizer.json, tokenizer_config.json and its chat templates."""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken

from cuformers.auto.tokenizers.family import GENERIC
from cuformers.auto.tokenizers.files import CONFIG, MORE_TEMPLATES, TEMPLATE, TOKENIZER
from cuformers.auto.tokenizers.special_tokens import EXTRA
from cuformers.base.errors import CheckpointError, bad_argument

if TYPE_CHECKING:
    from cuformers.auto.tokenizers.tokenizer import Tokenizer

# Said by tokenizer.json itself, or by other files of the folder.
_NOT_SAVED = ("add_bos_token", "add_eos_token", "added_tokens_decoder", "chat_template", "auto_map", "name_or_path")


def save(tokenizer: "Tokenizer", folder: Path) -> tuple[str, ...]:
    """Writes the files, each whole or not at all. Returns their paths.

    Raises ValueError for a template name that is no file name, CheckpointError where the folder can't be written.
    """
    files = {
        TOKENIZER: tokenizer.backend_tokenizer.to_str(pretty=True),
        CONFIG: json.dumps(_config(tokenizer), indent=2, sort_keys=True, ensure_ascii=False) + "\n",
        **_templates(tokenizer.chat_template),
    }
    try:
        for name, text in files.items():
            _write(folder / name, text)
    except OSError as error:
        raise CheckpointError(f"{folder} can't be written: {error}. Name a folder that this user may write.") from error
    return tuple(str(folder / name) for name in files)


def _config(tokenizer: "Tokenizer") -> dict[str, Any]:
    kept = {name: value for name, value in tokenizer._config.items() if name not in _NOT_SAVED and value is not None}
    kept |= {
        **tokenizer.special_tokens_map,
        "model_max_length": tokenizer.model_max_length,
        "padding_side": tokenizer.padding_side,
        "truncation_side": tokenizer.truncation_side,
        "clean_up_tokenization_spaces": tokenizer.clean_up_tokenization_spaces,
        "split_special_tokens": tokenizer.split_special_tokens,
        "model_input_names": tokenizer.model_input_names,
    }
    kept[EXTRA] = tokenizer.extra_special_tokens
    if not kept[EXTRA]:
        del kept[EXTRA]
    unset = [name for name in tokenizer.family.special_tokens if name not in tokenizer.special_tokens_map]
    kept |= dict.fromkeys(unset)  # null: keeps the class from putting its default there
    family = tokenizer.family.name
    kept["tokenizer_class"] = "PreTrainedTokenizerFast" if family == GENERIC.name else family  # 4.x knows this name too
    return {name: _plain(value) for name, value in kept.items()}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, AddedToken) else value


def _templates(held: str | dict[str, str] | None) -> dict[str, str]:
    if held is None:
        return {}
    named = {"default": held} if isinstance(held, str) else held
    for name in named:
        if Path(name).name != name or name in ("", ".", ".."):
            raise bad_argument("chat_template", name, "names that can be file names")
    return {TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja": text for name, text in named.items()}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
