"""What a request is told about its tokens: log-probabilities of the model's own logits, whatever was drawn from."""

import pytest
import torch
from models.checkpoints import shared, tokens

from cuformers.engine.engine import Engine
from cuformers.engine.group import Group
from cuformers.engine.request import Request, Sampling
from cuformers.generation.logits_processors import SuppressTokensLogitsProcessor


def expected(request: Request) -> torch.Tensor:
    """[generated, V]: log-softmax of a plain forward at each generated token's place."""
    ids = torch.tensor([request.context])
    with torch.no_grad():
        logits = shared("llama")(ids).logits[0].float()
    return logits[len(request.prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("lag", [0, 2])
def test_each_request_gets_what_it_asked_for(lag: int) -> None:
    engine = Engine(shared("llama"))
    engine.lag = lag
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 70, 12, 33)]
    drawn, banned = Sampling(temperature=1.5, seed=3), Group(processors=[SuppressTokensLogitsProcessor(range(3, 60))])
    requests = [
        Request(prompt=prompts[0], max_new_tokens=6, logprobs=0),
        Request(prompt=prompts[1], max_new_tokens=9, logprobs=5, sampling=drawn),
        Request(prompt=prompts[2], max_new_tokens=4, logprobs=12, group=banned),
        Request(prompt=prompts[3], max_new_tokens=7),
    ]
    engine.run(requests)
    for request in requests[:3]:
        rows = expected(request)
        chosen = rows.gather(1, torch.tensor(request.generated)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.token_logprobs), chosen, rtol=1e-5, atol=1e-5)
        best = rows.topk(request.logprobs or 1)
        for said, ids, values in zip(request.top_logprobs, best.indices.tolist(), best.values):
            assert len(said) == request.logprobs
            if request.logprobs:
                assert [token for token, _ in said] == ids
                torch.testing.assert_close(torch.tensor([v for _, v in said]), values, rtol=1e-5, atol=1e-5)
    assert not requests[3].token_logprobs and not requests[3].top_logprobs
