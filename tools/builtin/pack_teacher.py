"""Carries a 4-bit GGUF teacher to a machine in two small parts: its blocks as they are, under the checkpoint's names.

    python pack_teacher.py pack TEACHER.gguf HF_FOLDER PARTS     (needs the gguf package; HF_FOLDER: config, tokenizer)
    python pack_teacher.py unpack PARTS HF_FOLDER                (needs numpy, torch, safetensors)

Unpacking gives the same bf16 folder, bit for bit. Formats: llama.cpp's Q4_1, Q8_0 and F32.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def hf_name(name: str) -> str:
    """llama.cpp's tensor name as the checkpoint's."""
    if name in OUTER:
        return OUTER[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def pack(gguf_file: Path, folder: Path, parts: Path) -> None:
    """Two safetensors files of raw blocks (uint8 rows), each below 64 MB, and the small JSON files."""
    from gguf import GGUFReader  # type: ignore[import-not-found]

    reader = GGUFReader(gguf_file)
    heads = {
        kind: reader.fields[f"llama.attention.{field}"].contents()
        for kind, field in (("attn_q", "head_count"), ("attn_k", "head_count_kv"))
    }
    halves: tuple[dict, dict] = ({}, {})
    kinds: tuple[dict, dict] = ({}, {})
    half, size = sum(int(t.n_bytes) for t in reader.tensors) / 2, 0
    for tensor in reader.tensors:
        rows = np.ascontiguousarray(tensor.data).view(np.uint8)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in heads:  # llama.cpp interleaves the rotary halves' rows; a block never crosses a row
            n = heads[kind]
            rows = rows.reshape(n, len(rows) // n // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        side = int(size >= half)
        halves[side][hf_name(tensor.name)] = torch.from_numpy(rows.copy())
        kinds[side][hf_name(tensor.name)] = tensor.tensor_type.name
        size += int(tensor.n_bytes)
    parts.mkdir(parents=True, exist_ok=True)
    for side in (0, 1):
        save_file(halves[side], parts / f"part{side}.safetensors", metadata=kinds[side])
    for name in SMALL:
        shutil.copy(folder / name, parts / name)


def dequantize(rows: np.ndarray, kind: str) -> np.ndarray:
    """fp32 values of raw rows [..., bytes]."""
    if kind == "F32":
        return rows.view(np.float32)
    blocks = rows.reshape(*rows.shape[:-1], -1, {"Q4_1": 20, "Q8_0": 34}[kind])
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        values = scale * blocks[..., 2:].view(np.int8).astype(np.float32)
    else:
        least = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
        codes = blocks[..., 4:]
        values = scale * np.concatenate((codes & 15, codes >> 4), -1).astype(np.float32) + least
    return values.reshape(*rows.shape[:-1], -1)


def unpack(parts: Path, folder: Path) -> None:
    """Writes the bf16 Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for part in sorted(parts.glob("part*.safetensors")):
        with safe_open(part, "np") as file:
            for name in file.keys():  # noqa: SIM118  safe_open has no __iter__
                values = dequantize(file.get_tensor(name), file.metadata()[name])
                weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in SMALL:
        shutil.copy(parts / name, folder / name)


if __name__ == "__main__":
    if sys.argv[1:2] == ["pack"] and len(sys.argv) == 5:
        pack(*map(Path, sys.argv[2:]))
    elif sys.argv[1:2] == ["unpack"] and len(sys.argv) == 4:
        unpack(*map(Path, sys.argv[2:]))
    else:
        sys.exit(__doc__)
