"""Seconds from files in the page cache to weights on the GPU, beside Transformers' in the same run.

    python -m benchmarks.load --shapes qwen3-8b
    python -m benchmarks.load --shapes qwen3-8b --rings 16x8x16 8x12x32   # chunk MiB x readers x buffers

A gate comes first: every tensor's checksum on the GPU must be that of the tensor that was saved. The ceiling is a
pinned copy of the same machine.
"""

import argparse
import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import Rows, parser
from benchmarks.shapes import SHAPES
from cuformers import AutoConfig, AutoModelForCausalLM
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.plan import plan_load
from cuformers.checkpoint.stream import stream_copies
from cuformers.cuda import memory

GPU = torch.device("cuda", 0)


def checksum(tensor: Tensor) -> int:
    """Sum of the bytes in 64 bits, each times its place modulo 251: sensitive to values and to their order."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(251 << 18):
        place = torch.arange(piece.numel(), device=piece.device, dtype=torch.int32) % 251 + 1
        total += (piece.to(torch.int32) * place).sum(dtype=torch.int64)
    return int(total)


def checksums(model: nn.Module) -> dict[str, int]:
    """By parameter name, ties once."""
    return {name: checksum(parameter) for name, parameter in model.named_parameters()}


def pinned_bandwidth(nbytes: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes per second of copies from pinned host memory to the GPU."""
    host, device = (
        torch.ones(nbytes, dtype=torch.uint8).pin_memory(),
        torch.empty(nbytes, dtype=torch.uint8, device=GPU),
    )
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return repeats * nbytes / (time.perf_counter() - begin)


def make(shape: dict[str, Any], dtype: str, folder: Path) -> dict[str, int]:
    """Writes a checkpoint of random weights and returns what they sum to, in bf16."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype, device_map="cuda", seed=0)
    model.save_pretrained(folder, max_shard_size="5GB")
    return {name: checksum(parameter.bfloat16()) for name, parameter in model.named_parameters()}


def ours(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", device_map="cuda")


def peer(folder: Path) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")


def measured(load: Callable[[Path], nn.Module], folder: Path, expected: dict[str, int], repeats: int) -> dict[str, Any]:
    """Median seconds after one warm-up, which is also the gate; peaks of the last load."""
    seconds, peaks = [], {}
    for i in range(repeats + 1):
        gc.collect()
        memory.release_cached(GPU)
        before, host_before = memory.allocated_bytes(GPU), memory.allocated_bytes("cpu")
        memory.reset_peak(GPU)
        memory.reset_peak("cpu")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model = load(folder)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        final = memory.allocated_bytes(GPU) - before
        peaks = {
            "final_bytes": final,
            "peak_device_over_final": round((memory.peak_bytes(GPU) - before) / final, 4),
            "peak_host_growth_bytes": memory.peak_bytes("cpu") - host_before,
        }
        if i == 0:
            found = checksums(model)
            wrong = [name for name, value in found.items() if expected.get(name) != value]
            if wrong or len(found) != len(expected):
                raise SystemExit(f"the gate failed: {len(wrong)} tensors differ from what was saved: {wrong[:5]}")
        del model
    return {"seconds": sorted(seconds[1:])[(repeats - 1) // 2], "first_seconds": seconds[0], **peaks}


def ring(folder: Path, chunk: int, readers: int, slots: int, repeats: int) -> float:
    """Median seconds of the streaming alone, into a model that lies on the GPU already."""
    model = ours(folder)
    plan = plan_load(model, Index.open(folder), model.spec.weight_map)  # type: ignore[union-attr]
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        stream_copies(plan.copies, chunk_bytes=chunk, num_readers=readers, num_slots=slots)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds[1:])[(repeats - 1) // 2]


def folder_for(wanted: str | None, nbytes: int) -> Path:
    """A new folder: below `wanted`, or in shared memory where it has room, or in the default place for such."""
    shared = Path("/dev/shm")
    if wanted is None and shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * nbytes:
        wanted = str(shared)
    return Path(tempfile.mkdtemp(prefix="cuformers-load-", dir=wanted))


def bench(name: str, options: argparse.Namespace, rows: Rows, ceiling: float) -> None:
    folder = folder_for(options.folder, options.room)
    try:
        expected = make(SHAPES[name], options.file_dtype, folder)
        nbytes = Index.open(folder).nbytes
        common = {"benchmark": "load", "shape": name, "file_dtype": options.file_dtype, "file_bytes": nbytes}
        loaders = {"cuformers": ours} | ({} if options.no_peer else {"transformers": peer})
        for who, load in loaders.items():
            row = measured(load, folder, expected, options.repeats)
            rate = nbytes / row["seconds"]
            rows.add(
                **common, who=who, **row, gb_per_second=round(rate / 1e9, 2), of_pinned_copy=round(rate / ceiling, 3)
            )
        for text in options.rings:
            chunk, readers, slots = map(int, text.split("x"))
            seconds = ring(folder, chunk << 20, readers, slots, options.repeats)
            rate = nbytes / seconds
            rows.add(**common, who="stream", ring=text, seconds=seconds, of_pinned_copy=round(rate / ceiling, 3))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shapes", nargs="+", default=["qwen3-8b"], choices=list(SHAPES))
    options.add_argument("--file-dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options.add_argument("--folder", help="where to make the checkpoint; default /dev/shm where it has room")
    options.add_argument("--room", type=int, default=36 << 30, help="bytes that the checkpoint may need at most")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--rings", nargs="*", default=[], help="also the streaming alone: CHUNK_MIBxREADERSxBUFFERS")
    options.add_argument("--no-peer", action="store_true", help="do not measure Transformers")
    chosen = options.parse_args()
    rows = Rows(chosen)
    ceiling = pinned_bandwidth()
    rows.add(benchmark="pinned copy", gb_per_second=round(ceiling / 1e9, 2))
    for name in chosen.shapes:
        bench(name, chosen, rows, ceiling)
    rows.write()


if __name__ == "__main__":
    main()
