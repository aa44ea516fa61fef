"""Two small tokenizers of the kinds that checkpoints have: byte-level BPE, trained here, and SentencePiece-like."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Once upon a time there was a little cat. The cat liked to stop and look at the shop.",
    "Stop! said the dog, don't hop. It's a stopper, isn't it? \n\nThe end of the story.",
    "naïve café 你好世界 こんにちは 😀👩‍👩‍👧 \t tabs   and   spaces, numbers 123 456.",
] * 3


def _wrap(tokenizer: Tokenizer, **options: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", **options)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Pieces with ▁ for spaces, other characters as bytes: the decoder drops a text's first space."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    words = sorted({w for line in CORPUS for w in line.split()})
    pieces = ["<unk>", "<s>", "</s>", *bytes_, "▁", "\n", ".", ",", "!", "'"]
    pieces += [p for w in words for p in (f"▁{w}", w) if w.isascii() and w.isalpha()]
    vocab = {p: i for i, p in enumerate(dict.fromkeys(pieces + [chr(c) for c in range(97, 123)]))}
    tokenizer = Tokenizer(models.Unigram([(p, -1.0 if len(p) > 1 else -9.0) for p in vocab], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return _wrap(tokenizer)
