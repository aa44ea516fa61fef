"""Ops `sample` and `argmax`: from logits to tokens, without the host looking at a value.

    sample(logits [B, V], temperature [B] f32, top_k [B] i32, top_p [B] f32, min_p [B] f32, seeds [B] i64,
           positions [B] i64) -> [B] int64
    argmax(logits [B, V]) -> [B] int64

Off is: temperature 0 (the row is greedy), top_k 0, top_p 1, min_p 0. The order is that of Transformers: temperature,
then top_k (all ties of the k-th value stay), top_p on what top_k left, min_p last. The token is the argmax of scaled
logit + Gumbel noise, whose bits are a function of (seed, position, token id) alone: a request draws the same tokens
whatever shares its batch. Rows without any finite logit give token 0. B and V are at least 1.
"""

from collections.abc import Callable

from cuformers.kernels.op import Implementation, Op


def _op(name: str) -> Op:
    def load_triton() -> Callable:
        from cuformers.kernels.sample import triton

        return getattr(triton, name)

    def load_reference() -> Callable:
        from cuformers.kernels.sample import reference

        return getattr(reference, name)

    triton = Implementation(name="triton", load=load_triton, modes=frozenset({"infer"}), min_capability=(8, 0))
    return Op(name, (triton, Implementation(name="reference", load=load_reference)))


SAMPLE = _op("sample")
ARGMAX = _op("argmax")
