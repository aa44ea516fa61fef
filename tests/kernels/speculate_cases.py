"""Cases of the ops of speculative decoding, and the table of rows that they and the property tests work on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cuformers.kernels.advance import DecodeState
from cuformers.kernels.table import Kernels

from .judge import Call, Case


@dataclass(frozen=True)
class Row:
    """A row of the table: its tokens so far, of which the last is not yet in the cache; idle without any."""

    context: tuple[int, ...] = ()
    limit: int = 0
    eos: tuple[int, ...] = ()


def state_of(rows: Sequence[Row], *, groups: int, page: int, width: int) -> DecodeState:
    """The state of the rows, on pages in random order; what a row does not have yet is nonsense."""
    B, E, M = len(rows), max(len(r.eos) for r in rows), -(-width // page)
    lengths = torch.tensor([len(r.context) for r in rows], dtype=torch.int32)
    positions = (lengths - 1).clamp(min=0)
    history = torch.randint(0, 9, (B, width), dtype=torch.int32)
    for b, row in enumerate(rows):
        history[b, : len(row.context)] = torch.tensor(row.context, dtype=torch.int32)
    tables = torch.randperm(groups * B * M + 5)[: groups * B * M].view(groups, B, M).int()
    pages = tables.gather(2, (positions // page).long().expand(groups, B)[..., None])[..., 0]
    return DecodeState(
        tokens=history.gather(1, positions[:, None].long())[:, 0].long(),
        positions=positions,
        lengths=lengths,
        slots=(pages * page + positions % page).masked_fill(lengths == 0, -1),
        limits=torch.tensor([r.limit for r in rows], dtype=torch.int32),
        block_tables=tables,
        history=history,
        eos=torch.tensor([r.eos + (-1,) * (E - len(r.eos)) for r in rows]).view(B, E),
        page_size=page,
    )


@dataclass(frozen=True)
class LookupShape:
    """Rows of random tokens of a vocabulary; the smaller it is, the longer are the matches, and the later."""

    lengths: tuple[int, ...]
    vocabulary: int
    count: int = 4
    longest: int = 3

    def __str__(self) -> str:
        return f"{self.lengths[0]}x{len(self.lengths)}-v{self.vocabulary}-{self.count}of{self.longest}"

    def state(self, device: torch.device) -> DecodeState:
        rows = [Row(tuple(torch.randint(0, self.vocabulary, (n,)).tolist()), n + 2) for n in self.lengths]
        return on(state_of(rows, groups=1, page=16, width=max(self.lengths) + 5), device)


def traps(block: int, times: int, device: torch.device) -> DecodeState:
    """Rows of six blocks, in which hardly a token comes twice, `times` over.

    In the first, the only match of three tokens is at the beginning, and one of two is in each block after it. The
    second has a match of one token in each block. The third has two matches of one token, the first of which would be
    one of two if the row before belonged to it. The fourth is idle, but as full as the first.
    """
    tokens = torch.arange(100, 100 + 6 * block - 3).repeat(4, 1)
    starts = torch.arange(6) * block + 5
    third, second, last = tokens[0, -3:].tolist()
    tokens[0, starts] = second
    tokens[0, starts + 1] = last
    tokens[0, 4] = third
    tokens[1, starts] = last
    tokens[2, [0, block]] = last
    tokens[3] = tokens[0]
    rows = [Row(tuple(t), len(t) + 2) for t in tokens.tolist()] * times
    state = state_of(rows, groups=1, page=16, width=6 * block + 3)
    state.history[1::4, -1] = second
    state.lengths[3::4] = 0
    return on(state, device)


LOOKUPS = (
    LookupShape((90, 0, 1, 2, 3, 32, 33, 87), 5),
    LookupShape((95, 5, 64, 65, 16, 17, 90), 2, count=1, longest=1),
    LookupShape((70, 70, 70, 70, 70), 20, count=9, longest=2),
    LookupShape((11, 8, 5, 6), 2, count=7, longest=5),
)


def lookups(shapes: Sequence[LookupShape] = LOOKUPS) -> list[Case]:
    """draft_lookup on idle rows, rows too short for a match, and matches of all lengths."""
    return [Case("draft_lookup", str(s), lambda _, device, s=s: Call((s.state(device), s.count, s.longest)))
            for s in shapes]  # fmt: skip


def trapped(block: int = 16) -> list[Case]:
    """draft_lookup where a wrong search finds a wrong match; with many rows, one program searches each."""
    return [Case("draft_lookup", f"traps{n}-{block}", lambda _, device, n=n: Call((traps(block, n, device), 4)))
            for n in (1, 20)]  # fmt: skip


def drafting(count: int, num_rows: int, device: torch.device) -> tuple[DecodeState, Tensor, Tensor]:
    """(state, drafts, sampled) of random rows: drafts that end early, hold and fail, limits and ends of all kinds."""
    rows = []
    for n in torch.randint(0, 40, (num_rows,)).tolist():
        eos = tuple(torch.randint(0, 9, (2,)).tolist()) if n % 3 else ()
        rows.append(Row(tuple(torch.randint(0, 9, (n,)).tolist()), n + 1 + n % (count + 2), eos))
    state = on(state_of(rows, groups=2, page=8, width=100), device)
    sampled = torch.randint(0, 9, (num_rows, count + 1))
    wrong = torch.rand(num_rows, count) < 0.2
    drafts = torch.where(wrong, torch.randint(-1, 9, (num_rows, count)), sampled[:, :count])
    return state, drafts.to(device), sampled.to(device)


def spreads() -> list[Case]:
    """spread_drafts and accept, on the same rows."""
    cases = []
    for count in (1, 3, 6):

        def make(dtype: torch.dtype, device: torch.device, count: int = count) -> Call:
            del dtype
            return Call(drafting(count, 60, device)[:2])

        def make_accept(dtype: torch.dtype, device: torch.device, count: int = count) -> Call:
            del dtype
            state, drafts, sampled = drafting(count, 60, device)
            return Call((), {"sampled": sampled, "drafts": drafts, "state": state}, ("state",))

        cases += [Case("spread_drafts", str(count), make), Case("accept", str(count), make_accept)]
    return cases


def on(state: DecodeState, device: torch.device) -> DecodeState:
    """The state on a device."""
    return state._replace(**{name: x.to(device) for name, x in state.tensors()})


def repeating(width: int) -> DecodeState:
    """Rows that soon go round in a circle under `speculate`, one of them idle, in a table for `width` tokens."""
    contexts = [tuple(torch.randint(0, 7, (n,)).tolist()) for n in (30, 1, 0, 77)]
    rows = [Row(c, len(c) + 60 + i, ()) if c else Row() for i, c in enumerate(contexts)]
    return state_of(rows, groups=2, page=16, width=width)


def speculate(ops: Kernels, state: DecodeState, count: int) -> Tensor:
    """A step of a model that needs no keys: what each row emits [B, count + 1]."""
    drafts = ops.draft_lookup(state, count)
    rows = ops.spread_drafts(state, drafts)
    return ops.accept(((rows.tokens * 3 + 1) % 7).view(-1, count + 1), drafts, state)
