# ruff: noqa: RUF001
"""Tokenizers that these tests use: a real one with byte fallback, and small ones trained here."""

import json
from pathlib import Path

from paths import DATA
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

STORIES = DATA / "tokenizers" / "stories260k"
CORPUS = [
    "Once upon a time there was a little girl named Lily. She didn't like the rain, but she loved her red ball!",
    "def add(first, second):\n    return first + second  # 1234567890",
    "你好，世界。こんにちは世界。Привет, мир! مرحبا بالعالم. naïve café Ångström 👍🏽 👩‍👩‍👧‍👦",
] * 4


def write_folder(folder: Path, rust: Tokenizer, **config) -> Path:
    """A checkpoint folder with this tokenizer; `model_type` goes to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model_type = config.pop("model_type", None)
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def train_byte_level() -> Tokenizer:
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return rust


def train_word_piece() -> Tokenizer:
    rust = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(cleanup=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    rust.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    ends = [(token, rust.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return rust


def train_unigram() -> Tokenizer:
    rust = Tokenizer(models.Unigram())
    rust.normalizer = normalizers.NFKC()
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>", "<pad>"]
    rust.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    return rust


def gemma_like(rust: Tokenizer) -> Tokenizer:
    """Gemma's pipeline over a byte-fallback vocabulary; its <mask> is listed as an ordinary token."""
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    rust.add_tokens([AddedToken("<mask>", normalized=False, special=False)])
    return rust


def write_folders(root: Path) -> dict[str, Path]:
    """Folders by what is particular to them."""
    byte_level, end = train_byte_level(), "<|endoftext|>"
    config = {"bos_token": end, "eos_token": end, "model_max_length": 64}
    stories = Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    llama = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    bert = train_word_piece()
    padded = Tokenizer.from_str(bert.to_str())
    padded.enable_padding(length=12, pad_token="[PAD]")
    padded.enable_truncation(12)
    return {
        "stories": STORIES,
        "generic": write_folder(root / "generic", byte_level, tokenizer_class="PreTrainedTokenizerFast", **config),
        "gpt2": write_folder(root / "gpt2", byte_level, tokenizer_class="GPT2Tokenizer", **config),
        "gpt2-space": write_folder(
            root / "gpt2-space", byte_level, tokenizer_class="GPT2TokenizerFast", add_prefix_space=True, **config
        ),
        "neox": write_folder(root / "neox", byte_level, model_type="gpt_neox", add_bos_token=True),
        "deepseek": write_folder(
            root / "deepseek", byte_level, model_type="deepseek_v3", **{**llama, **config, "add_bos_token": True}
        ),
        "llama": write_folder(root / "llama", stories, model_type="llama", **llama),
        "llama-legacy": write_folder(root / "llama-legacy", stories, legacy=True, **llama),
        "mistral": write_folder(root / "mistral", stories, model_type="mistral", **llama),
        "gemma": write_folder(
            root / "gemma", gemma_like(Tokenizer.from_str(stories.to_str())), model_type="gemma2", bos_token="<s>"
        ),
        "bert": write_folder(root / "bert", bert, model_type="bert", do_lower_case=False),
        "bert-padded": write_folder(root / "bert-padded", padded, clean_up_tokenization_spaces=True),
        "unigram": write_folder(
            root / "unigram", train_unigram(), eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
        ),
        "added": write_folder(
            root / "added",
            byte_level,
            **config,
            image_token="<image>",
            added_tokens_decoder={
                "400": {"content": "<image>", "special": True, "normalized": False},
                "401": {"content": " word ", "special": False, "lstrip": True, "rstrip": True},
            },
            extra_special_tokens=["<|im_start|>", "<new>"],
        ),
    }


NAMES = (
    *("stories", "generic", "gpt2", "gpt2-space", "neox", "deepseek", "llama", "llama-legacy"),
    *("mistral", "gemma", "bert", "bert-padded", "unigram", "added"),
)
