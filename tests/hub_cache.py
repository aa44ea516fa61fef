"""A huggingface_hub cache in a folder, so that hub ids resolve offline: tiny random checkpoints under real names."""

import json
import shutil
from pathlib import Path

import pytest

from tests.paths import DATA
from tests.tokenizers.tokenizer_folders import train_word_piece, write_folder

QWEN3 = "Qwen/Qwen3-0.6B"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
COMMIT = "0" * 40
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def fill(hub: Path, name: str = QWEN3) -> Path:
    """Makes the cache entry of one repository, a random Qwen3 of two layers with a real tokenizer; its folder."""
    from cuformers import AutoConfig, AutoModelForCausalLM

    folder = _entry(hub, name)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,  # logits far enough apart for two programs to choose the same tokens
    )
    AutoModelForCausalLM.from_config(config, dtype="float32", device_map="cpu", seed=0).save_pretrained(folder)
    tokenizer = DATA / "tokenizers" / "stories260k"
    shutil.copy(tokenizer / "tokenizer.json", folder)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings |= {"chat_template": CHAT_TEMPLATE, "pad_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def fill_minilm(hub: Path) -> Path:
    """The same of a random BERT of two layers, with sentence-transformers' files; its folder."""
    from cuformers import AutoConfig, AutoModel

    folder = _entry(hub, MINILM)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", vocab_size=200, max_position_embeddings=64, **sizes)
    AutoModel.from_config(config, dtype="float32", device_map="cpu", seed=0).save_pretrained(folder)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    write_folder(folder, train_word_piece(), tokenizer_class="BertTokenizer", model_max_length=64, **special)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def _entry(hub: Path, name: str) -> Path:
    """The folder of a repository's only commit, in the cache."""
    repo = hub / ("models--" + name.replace("/", "--"))
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return folder


def offline(patch: pytest.MonkeyPatch, hub: Path) -> None:
    """Makes huggingface_hub of this process use the cache, and never the network."""
    import huggingface_hub.constants as constants

    patch.setattr(constants, "HF_HUB_CACHE", str(hub))
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
