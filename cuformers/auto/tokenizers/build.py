"""From a tokenizer's files and the caller's options to the parts that a `Tokenizer` is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from cuformers.auto.tokenizers import stages as pipeline
from cuformers.auto.tokenizers.encode import NO_LIMIT
from cuformers.auto.tokenizers.family import GENERIC, Family, choose_family
from cuformers.auto.tokenizers.files import TokenizerFiles, as_token, read_files
from cuformers.auto.tokenizers.special_tokens import EXTRA, EXTRA_OLDER, NAMES
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice

OPTIONS = frozenset(
    (
        *NAMES,
        EXTRA,
        EXTRA_OLDER,
        "padding_side",
        "truncation_side",
        "model_max_length",
        "model_input_names",
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "clean_up_tokenization_spaces",
        "split_special_tokens",
        "chat_template",
        "do_lower_case",
        "strip_accents",
        "tokenize_chinese_chars",
        "legacy",
        "use_fast",
        "trust_remote_code",
    )
)
_BYTE_LEVEL = ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer")
_BERT_ONLY = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a `Tokenizer` is made of."""

    name: str
    """The folder or hub id it came from."""
    rust: RustTokenizer
    """The Rust tokenizer, fitted to family and options."""
    family: Family
    """The class its files name."""
    config: dict[str, Any]
    """tokenizer_config.json with the options, for saving."""
    named: dict[str, str | AddedToken]
    """Special tokens by role."""
    extra: list[str | AddedToken]
    """Special tokens without a role."""
    add_bos_token: bool
    """Whether the caller asked for bos before every text; None of the caller's: tokenizer.json decides."""
    add_eos_token: bool
    """The same for eos after it."""
    padding_side: str
    """left or right."""
    truncation_side: str
    """left or right: the side that tokens are cut from."""
    model_max_length: int
    """Tokens that the model takes; 1e30 where the files don't say."""
    model_input_names: tuple[str, ...]
    """What a call returns by default."""
    clean_up_tokenization_spaces: bool
    """Whether decoding takes out spaces before punctuation (never for BPE)."""
    split_special_tokens: bool
    """Whether special tokens in a text are encoded as plain text."""
    chat_template: str | dict[str, str] | None
    """The chat template, or several by name."""


def build(name_or_path: str | Path, where: Mapping[str, Any], options: Mapping[str, Any]) -> Parts:
    """Reads the files (`where`: arguments of `read_files`) and applies the options to them."""
    options = _check_options(options)
    files = read_files(name_or_path, **where)
    family = choose_family(files.config, files.model_config)
    if family.name == "LlamaTokenizer" and pipeline.is_byte_level(files.rust):
        # DeepSeek's files carry Llama's class name over another pipeline, which Llama's would break
        family = family._replace(name=GENERIC.name)
    _check_family_options(family, options)
    config = {**_own_defaults(files.rust), **files.config, **options}
    extra_given = config.pop(EXTRA_OLDER, None)
    if config.get(EXTRA) is None:
        config[EXTRA] = extra_given
    rust = files.rust
    pipeline.fit_to_family(rust, family, config)
    prefix = config.get("add_prefix_space")
    asked = "add_prefix_space" in options and family.name != "LlamaTokenizer"
    if prefix is not None and (asked or family.name in _BYTE_LEVEL):
        pipeline.set_prefix_space(rust, bool(prefix))
    rust.no_truncation()
    rust.no_padding()
    named, extra = _special_tokens(family, config, files)
    _add_missing(rust, files.added_tokens, named, extra, roles_are_special=family.name != GENERIC.name)
    bos, eos = (bool(options.get(f"add_{name}_token", False)) for name in ("bos", "eos"))
    if rust.post_processor is None or "add_bos_token" in options or "add_eos_token" in options:
        rust.post_processor = pipeline.template(
            _with_id(rust, named, "bos_token") if bos else None, _with_id(rust, named, "eos_token") if eos else None
        )
    limit = config.get("model_max_length") or config.get("max_len")
    return Parts(
        name=files.name,
        rust=rust,
        family=family,
        config=config,
        named=named,
        extra=extra,
        add_bos_token=bos,
        add_eos_token=eos,
        padding_side=config.get("padding_side") or family.padding_side,
        truncation_side=config.get("truncation_side") or "right",
        model_max_length=NO_LIMIT if limit is None else int(limit),
        model_input_names=tuple(config.get("model_input_names") or family.model_input_names),
        clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
        split_special_tokens=bool(config.get("split_special_tokens", False)),
        chat_template=options.get("chat_template", files.chat_template),
    )


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something; ValueError for unknown ones and for what can't be honoured."""
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise bad_argument("from_pretrained", ", ".join(unknown), ", ".join(sorted(OPTIONS)))
    given = {name: value for name, value in options.items() if value is not None}
    if not given.pop("use_fast", True):
        raise bad_argument("use_fast", False, "True", "There are no slow tokenizers; this one gives the same ids.")
    if given.pop("trust_remote_code", False):
        notice("trust_remote_code: no code from a checkpoint is ever run; its tokenizer.json is used", once=True)
    return given


def _check_family_options(family: Family, options: Mapping[str, Any]) -> None:
    for names, wanted in ((_BERT_ONLY, "BertTokenizer"), (("legacy",), "LlamaTokenizer")):
        for name in names:
            if name in options and family.name != wanted:
                raise bad_argument(name, options[name], f"nothing for a {family.name}", f"It is {wanted}'s option.")


def _own_defaults(rust: RustTokenizer) -> dict[str, Any]:
    """What the padding and truncation stored in tokenizer.json say about later calls."""
    defaults: dict[str, Any] = {}
    if rust.padding is not None:
        defaults |= {"pad_token": rust.padding["pad_token"], "padding_side": rust.padding["direction"]}
    if rust.truncation is not None:
        defaults["truncation_side"] = rust.truncation["direction"]
    return defaults


def _special_tokens(
    family: Family, config: Mapping[str, Any], files: TokenizerFiles
) -> tuple[dict[str, str | AddedToken], list[str | AddedToken]]:
    """Special tokens by role, with the properties that the files give them, and those without a role."""
    values: dict[str, Any] = {name: config.get(name, family.special_tokens.get(name)) for name in NAMES}
    values |= {name: value for name, value in config.items() if name.endswith("_token") and name not in NAMES}
    extra = config.get(EXTRA) or []
    if isinstance(extra, Mapping):
        values, extra = values | dict(extra), []
    named = {
        name: as_token(value, f"{name} of the tokenizer's config")
        for name, value in values.items()
        if isinstance(value, (str, AddedToken, Mapping))
    }
    listed = files.rust.get_added_tokens_decoder().values()
    known = {str(token): token for token in (*files.added_tokens.values(), *listed)}
    if files.added_tokens:
        known |= {str(token): token for token in files.added_tokens.values()}
    named = {name: known.get(str(token), token) for name, token in named.items()}
    return named, [as_token(token, EXTRA) for token in extra]


def _add_missing(
    rust: RustTokenizer,
    added: Mapping[int, AddedToken],
    named: Mapping[str, str | AddedToken],
    extra: list[str | AddedToken],
    *,
    roles_are_special: bool,
) -> None:
    """Tells the Rust tokenizer of the tokens that its tokenizer.json leaves out or gives other properties."""
    listed = list(rust.get_added_tokens_decoder().values())
    held, exact = {str(token) for token in listed}, {repr(token) for token in listed}
    tokens = [token for _, token in sorted(added.items()) if repr(token) not in exact]
    held |= {str(token) for token in tokens}
    for token in (*named.values(), *extra):
        if str(token) not in held:
            held.add(str(token))
            tokens.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    roles = {str(token) for token in named.values()}
    if roles_are_special:  # such as Gemma's <mask>, which its tokenizer.json lists as an ordinary token
        tokens += [token for token in listed if str(token) in roles and not token.special]
    for token in tokens:
        if str(token) in roles and not token.special:
            token.special = True
    if tokens:
        rust.add_tokens(tokens)
    for i, token in sorted(added.items()):
        if rust.token_to_id(str(token)) != i:
            notice(f"token {str(token)!r} has id {i} in the tokenizer's files and {rust.token_to_id(str(token))} here")


def _with_id(rust: RustTokenizer, named: Mapping[str, str | AddedToken], name: str) -> tuple[str, int]:
    text = str(named[name]) if name in named else None
    found = None if text is None else rust.token_to_id(text)
    if text is None or found is None:
        raise bad_argument(f"add_{name}", True, "False", f"This tokenizer has no {name}: pass {name}= too.")
    return text, found
