"""Trains the built-in model and its tokenizer: `python train.py OUT --source grammar:400000 --source teacher.txt.xz`.

A plain loop: rows of whole stories, Muon + AdamW, warm-up then a linear fall to zero, bf16 on CUDA. Writes OUT as a
Hugging Face folder, OUT-loss.csv and OUT-run.json beside it, and prints samples. Runs on a CPU too. Same arguments,
same machine: same data and order; the time limit ends a run early, so pass --steps for a repeatable one.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Callable
from pathlib import Path

import finish
import torch
import torch.nn.functional as F
from corpus import Source, Stream, read, tail, train_tokenizer
from llama import Llama, Shape
from muon import optimizers
from tokenizers import Tokenizer
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor], Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the trained model")
    parser.add_argument("--source", action="append", required=True, help="grammar:COUNT or FILE[:COUNT], then @WEIGHT")
    parser.add_argument("--common", type=int, default=50, help="a file's story stays if each word is in this many")
    parser.add_argument("--tails", type=float, default=0.1, help="share of stories that begin in the middle")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", type=int, default=128, help="rows of --context tokens a step")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--minutes", type=float, default=5.0, help="the schedule ends at whichever comes first")
    parser.add_argument("--lr", type=float, default=0.004, help="AdamW's peak: embedding and norms")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="Muon's peak: matrices")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--every", type=int, default=250, help="steps between evaluations")
    parser.add_argument("--held-rows", type=int, default=512, help="rows of each source an evaluation reads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward pass")
    return parser.parse_args()


def make_model(args: argparse.Namespace, device: str) -> Llama:
    shape = Shape(vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.inner,
                  num_hidden_layers=args.layers, num_attention_heads=args.heads,
                  num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
                  max_position_embeddings=args.context)  # fmt: skip
    model = Llama(shape).to(device)
    for name, p in model.named_parameters():
        if "embed" in name:
            nn.init.normal_(p, std=0.02)
        elif p.ndim == 2:
            # a branch that starts at zero leaves the residual stream alone until it has learnt something
            nn.init.zeros_(p) if name.endswith(("o_proj.weight", "down_proj.weight")) else nn.init.normal_(
                p, std=p.shape[1] ** -0.5
            )
    return model


class Mixture:
    """Draws rows: first a source by weight, then a story of it."""

    def __init__(self, streams: list[Stream], weights: list[float], seed: int, device: str) -> None:
        self.streams, self.device = streams, device
        self.weights = torch.tensor(weights)
        self.rng = torch.Generator().manual_seed(seed)

    def draw(self, rows: int, context: int) -> Tensor:
        """Token rows [rows, context + 1]."""
        which = torch.multinomial(self.weights, rows, replacement=True, generator=self.rng).bincount(
            minlength=len(self.streams)
        )
        parts = []
        for stream, count in zip(self.streams, which.tolist(), strict=True):
            index = torch.randint(len(stream.starts), (count,), generator=self.rng).to(self.device)
            parts.append(stream.rows(stream.starts[index], context))
        return torch.cat(parts)


def evaluate(model: nn.Module, stream: Stream, context: int, most: int, loss_of: Loss) -> float:
    """Mean nats a token over at most `most` held-out rows; rows follow one another, so stories may be cut."""
    starts = torch.arange(0, max(1, len(stream.ids) - context - 1), context, device=stream.ids.device)[:most]
    with torch.no_grad():
        return sum(float(loss_of(model, stream.rows(part, context))) * len(part) for part in starts.split(64)) / len(
            starts
        )


def schedule(progress: float, step: int, warmup: int) -> float:
    """Factor of the peak rate: linear up over `warmup` steps, flat to 30% of the run, linear down to zero."""
    return min((step + 1) / warmup, 1.0, (1 - progress) / 0.7)


def prepare(args: argparse.Namespace, device: str) -> tuple[Tokenizer, Mixture, dict[str, Stream]]:
    """Tokenizer, training mixture and held-out streams."""
    rng = random.Random(args.seed)
    sources: list[Source] = []
    weights: list[float] = []
    for spec in args.source:
        spec, _, weight = spec.partition("@")
        sources.append(read(spec, common=args.common, seed=args.seed))
        weights.append(float(weight or 1))
        learn, held = len(sources[-1].train), len(sources[-1].held)
        print(f"{sources[-1].name}: {learn} stories to learn, {held} held out", flush=True)
    tokenizer = train_tokenizer([text for s in sources for text in s.train[:40_000]], args.vocab)
    streams = []
    for source in sources:
        texts = [tail(t, rng) if rng.random() < args.tails else t for t in source.train]
        streams.append(Stream.of(texts, tokenizer, args.context).to(device))
        count = len(streams[-1].ids)
        print(f"{source.name}: {count} tokens, {streams[-1].bytes / count:.2f} bytes a token", flush=True)
    apart = {s.name: Stream.of(s.held, tokenizer, args.context).to(device) for s in sources if s.held}
    return tokenizer, Mixture(streams, weights, args.seed, device), apart


def train(
    args: argparse.Namespace, device: str, model: Llama, mixture: Mixture, held: dict[str, Stream]
) -> dict[str, float]:
    """The loop; returns the last held-out losses."""

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(rows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    step_loss = torch.compile(loss_of) if args.compile else loss_of
    optims = optimizers(model, args.lr, args.muon_lr)
    log = (args.out.parent / f"{args.out.name}-loss.csv").open("w", newline="")
    writer = csv.writer(log)
    writer.writerow(["step", "seconds", "tokens", "train", *held])
    begin, running, last, step, progress = time.monotonic(), torch.zeros((), device=device), {}, 0, 0.0
    while progress < 1:
        for optimizer in optims:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(progress, step, args.warmup)
        loss = step_loss(model, mixture.draw(args.rows, args.context))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optims:
            optimizer.step()
            optimizer.zero_grad()
        running += loss.detach()
        step += 1
        seconds = time.monotonic() - begin
        progress = max(step / args.steps, seconds / 60 / args.minutes)
        if step % args.every == 0 or progress >= 1:
            last = {
                name: evaluate(model, stream, args.context, args.held_rows, loss_of) for name, stream in held.items()
            }
            since = args.every if step % args.every == 0 else step % args.every
            values = [float(running) / since, *last.values()]
            writer.writerow([step, f"{seconds:.1f}", step * args.rows * args.context, *(f"{v:.4f}" for v in values)])
            log.flush()
            print(f"step {step}  {seconds:.0f} s  train {values[0]:.4f}  held out {last}", flush=True)
            running.zero_()
    log.close()
    return last


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, mixture, held = prepare(args, device)
    model = make_model(args, device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    last = train(args, device, model, mixture, held)
    finish.save(args, model, tokenizer, last)
    print("\n".join(finish.samples(args.out, tokenizer, device)), flush=True)


if __name__ == "__main__":
    main()
