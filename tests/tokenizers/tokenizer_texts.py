# ruff: noqa: RUF001
"""Random texts of the kinds that break tokenizers."""

import random

PIECES = [
    *("👩‍👩‍👧‍👦", "👍🏽", "🇫🇷", "漢字仮名", "你好，世界", "한국어", "ไทย", "مرحبا بالعالم", "עברית", "क्ष", "é", "ä"),
    *(" " * 7, "\t\t", "\n\n\n", "\r\n", "\x00", "\x07", "\x7f", "\u200b", "\ufeff", "\u00a0", "\u3000", "\ufffd"),
    *("ﬁ", "Å", "Å", "ẞ", "İ", "𝕏", "12345", "3.14", "don't", "HELLO", "hello", "_x_", "z" * 30, "a", "B", " "),
    *("def f(x):\n    return x", "...", "!?", " .", ",", "'s", " '", " n't", "▁", "Ġ", "<0x41>", "##a"),
    *("<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[MASK]", "[SEP]", "<image>", "<new>"),
]


def random_texts(count: int, extra: list[str], seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    pool = PIECES + extra
    joints = ["", "", " "]
    return [rng.choice(joints).join(rng.choice(pool) for _ in range(rng.randint(0, 12))) for _ in range(count)]
