"""The few changes made to a `tokenizer.json` pipeline after it is read: by family, by option, by bos and eos."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from cuformers.auto.tokenizers.family import Family
from cuformers.base.errors import bad_argument

_SPACE = "▁"


def fit_to_family(rust: RustTokenizer, family: Family, config: Mapping[str, Any]) -> None:
    """What Transformers 5.17 does to the pipelines of these classes, whatever their tokenizer.json says."""
    if family.name == "LlamaTokenizer":
        _as_llama(rust, config)
    elif family.name == "BertTokenizer":
        rust.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=config.get("tokenize_chinese_chars", True),
            strip_accents=config.get("strip_accents"),
            lowercase=config.get("do_lower_case", True),
        )
        rust.decoder = decoders.WordPiece(prefix="##")
    elif family.name == "GPTNeoXTokenizer":
        rust.post_processor = template(None, None)  # its offsets are not trimmed


def _as_llama(rust: RustTokenizer, config: Mapping[str, Any]) -> None:
    """SentencePiece's leading space once a text (`legacy` false, the default) or once between special tokens."""
    leading = config.get("add_prefix_space")
    leading = True if leading is None else bool(leading)
    scheme = ("always" if config.get("legacy", False) else "first") if leading else "never"
    rust.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * leading)


def set_prefix_space(rust: RustTokenizer, value: bool) -> None:
    """Whether a text's first word is encoded as if a space came before it. ValueError where the pipeline has no such
    step."""
    state = part(rust, "pre_tokenizer")
    steps = state.get("pretokenizers", [state])
    found = [step for step in steps if step.get("type") in ("ByteLevel", "Metaspace")]
    if not found:
        raise bad_argument("add_prefix_space", value, "None", "This tokenizer has no step that adds a space.")
    for step in found:
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = value
        else:
            step["prepend_scheme"] = "always" if value else "never"
    rust.pre_tokenizer = parsed("pre_tokenizer", state).pre_tokenizer


def template(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.TemplateProcessing:
    """The post-processor that puts these tokens (text, id) around each sequence; the second one has type 1."""

    def around(sequence: str, kind: int) -> str:
        parts = [bos[0] if bos else "", f"${sequence}", eos[0] if eos else ""]
        return " ".join(f"{part}:{kind}" for part in parts if part)

    tokens = [token for token in (bos, eos) if token]
    pair = f"{around('A', 0)} {around('B', 1)}"
    return processors.TemplateProcessing(single=around("A", 0), pair=pair, special_tokens=tokens)


def part(rust: RustTokenizer, name: str) -> dict[str, Any]:
    """One part of the pipeline (`normalizer`, `pre_tokenizer`, `decoder`) as tokenizer.json spells it; {} for none."""
    held = getattr(rust, name)
    return {} if held is None else json.loads(held.__getstate__())


def is_byte_level(rust: RustTokenizer) -> bool:
    """Whether the vocabulary spells bytes, as GPT-2's does."""
    return '"type": "ByteLevel"' in json.dumps([part(rust, "pre_tokenizer"), part(rust, "decoder")])


def parsed(name: str, state: dict[str, Any]) -> RustTokenizer:
    """A tokenizer whose one part is made from its spelling in tokenizer.json."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    return RustTokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model, name: state}))
