"""penalize against its reference, with other options in every row, shared by the interpreter's tests and the GPU's."""

import torch
from torch import Tensor

from cuformers.kernels.penalize import Penalties, workspace

from .judge import poisoned

Options = tuple[float, float, float, int]
"""(repetition, frequency, presence, min_new_tokens); the last row has just generated its minimum."""
OPTIONS: tuple[Options, ...] = (
    (1.0, 0.0, 0.0, 0),
    (1.3, 0.0, 0.0, 0),
    (0.7, 0.0, 0.0, 90),
    (1.0, 0.4, 0.0, 0),
    (1.0, 0.0, -0.3, 2),
    (1.7, 0.37, 0.21, 5),
    (1.1, -0.33, 1.9, 33),
)
BIASES: tuple[dict[int, float], ...] = (
    {},
    {2: 3.5, 7: -torch.inf},
    {},
    {0: -1.3, 3: 0.7, 17: 5.5},
    {4: -torch.inf, 3: 2.5},
    {1: 2.2, 5: 0.1},
    {7: 4.0},
)
"""Of each row."""
EOS = ((2, -1), (7, 9), (9, 10**6), (-1, -1), (2, 3), (1, -1), (7, 2))


class Batch:
    """Seven rows of history in another order than their logits, one of which is nobody's."""

    def __init__(self, num_tokens: int, longest: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(num_tokens + longest)
        count = len(OPTIONS)
        self.logits = (torch.randn(count + 1, num_tokens) * 3).to(device, dtype)
        self.logits[1, ::5] = 0
        self.logits[2, 3] = -torch.inf
        self.rows = torch.tensor([6, 0, 5, -1, 3, 1, 4, 2], dtype=torch.int32, device=device)
        by_row = torch.tensor([longest, longest // 2, 1, longest - 1, longest // 3, longest, 40])
        self.prompts = torch.tensor([longest // 4, 1, 1, longest // 3, longest // 3, longest // 2, 7])
        self.lengths = by_row[self.rows.cpu().clamp(min=0)].int().to(device)
        tokens = torch.randint(0, min(num_tokens, 12), (count, longest + 3))
        tokens[:, ::3] = torch.randint(0, num_tokens, tokens[:, ::3].shape)
        self.history = tokens.int().to(device)
        self.penalties = self._penalties(device)

    def _penalties(self, device: torch.device) -> Penalties:
        repetition, frequency, presence, least = zip(*OPTIONS)
        width = max(map(len, BIASES))
        ids = [[*b, *[-1] * (width - len(b))] for b in BIASES]
        bias = [[*b.values(), *[torch.nan] * (width - len(b))] for b in BIASES]
        made = Penalties(
            prompt_lengths=self.prompts.int(),
            repetition=torch.tensor(repetition),
            frequency=torch.tensor(frequency),
            presence=torch.tensor(presence),
            min_new_tokens=torch.tensor(least, dtype=torch.int32),
            eos=torch.tensor(EOS),
            bias_ids=torch.tensor(ids),
            bias=torch.tensor(bias),
        )
        return Penalties(*(x.to(device) for x in made))

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Penalties]:
        return self.logits, self.rows, self.lengths, self.history, self.penalties


def check_penalties(num_tokens: int, longest: int, dtype: torch.dtype, device: torch.device) -> None:
    """The same numbers to the bit, twice, and a workspace that is left empty."""
    from cuformers.kernels.penalize import reference, triton

    batch = Batch(num_tokens, longest, dtype, device)
    counts = workspace(len(OPTIONS), num_tokens, device)
    expected = reference.penalize(*batch.arguments)
    for _ in range(2):
        with poisoned():
            found = triton.penalize(*batch.arguments, counts)
        assert torch.equal(found, expected)
        assert not counts.any()
    none = batch.penalties._replace(eos=batch.penalties.eos[:, :0], bias_ids=batch.penalties.bias_ids[:, :0],
                                    bias=batch.penalties.bias[:, :0])  # fmt: skip
    arguments = (*batch.arguments[:4], none)
    assert torch.equal(triton.penalize(*arguments, counts), reference.penalize(*arguments))
