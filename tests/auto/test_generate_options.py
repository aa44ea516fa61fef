"""Where generate ends, what it returns, what it hands to the user's code, and what it refuses: as transformers does."""

import json
import time
from pathlib import Path

import pytest
import torch
import transformers
from models.checkpoints import folder, load, oracle, shared, tokens
from paths import DATA
from torch import Tensor

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.engine.group import Group
from cuformers.generation.config import GenerationConfig

NAME = "llama"
STORIES = DATA / "checkpoints/stories260k"


def run(model, ids: Tensor, **options):
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def both(ids: Tensor, **options) -> tuple:
    return run(shared(NAME), ids, **options), run(oracle(NAME), ids, **options)


@pytest.fixture(scope="module")
def free() -> Tensor:
    """What three rows say when nothing ends them, [3, 20]."""
    return run(shared(NAME), tokens(3, 6), eos_token_id=None)[:, 6:]


@pytest.mark.parametrize("places", [(2,), (4, 9), (0,), (0, 1, 2)])
def test_eos_ends_a_row_and_the_rest_is_padding(free: Tensor, places: tuple[int, ...]) -> None:
    eos = [int(free[i % 3, place]) for i, place in enumerate(places)]
    ours, theirs = both(tokens(3, 6), eos_token_id=eos)
    assert torch.equal(ours, theirs)
    ends = [next((i for i, t in enumerate(row) if t in eos), 19) for row in free.tolist()]
    assert ours.shape[1] == 6 + max(ends) + 1
    for row, end in zip(ours[:, 6:].tolist(), ends):
        assert row[end + 1 :] == [0] * (len(row) - end - 1)


def test_a_minimum_keeps_eos_away(free: Tensor) -> None:
    eos = int(free[0, 1])
    ours, theirs = both(tokens(3, 6), eos_token_id=eos, min_new_tokens=9)
    assert torch.equal(ours, theirs) and (ours[:, 6:15] != eos).all()


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [17, 30]], "suppress_tokens": [8, 9]},
    {"sequence_bias": {(12,): 4.0, (40, 41): -3.0}, "begin_suppress_tokens": [7]},
    {"forced_eos_token_id": 3, "renormalize_logits": True},
    {"max_length": 15, "max_new_tokens": None, "min_length": 12},
    {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 11},
])  # fmt: skip
def test_options_give_transformers_tokens(options: dict) -> None:
    ours, theirs = both(tokens(3, 6), **options)
    assert torch.equal(ours, theirs)


def test_scores_logits_and_logprobs() -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    ids = tokens(3, 6)
    ours = run(shared(NAME), ids, output_logprobs=True, eos_token_id=None, **options)
    theirs = run(oracle(NAME), ids, eos_token_id=None, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for kind in ("scores", "logits"):
        mine, expected = (torch.stack(out[kind]) for out in (ours, theirs))
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-4)
    chosen = ours.sequences[:, 6:].T[..., None]
    expected = torch.stack(theirs.logits).log_softmax(-1).gather(-1, chosen)[..., 0].T
    torch.testing.assert_close(ours.logprobs, expected, rtol=1e-5, atol=1e-4)


def test_outputs_end_with_their_row(free: Tensor) -> None:
    out = run(shared(NAME), tokens(3, 6), eos_token_id=int(free[0, 3]), return_dict_in_generate=True,
              output_logits=True, output_logprobs=True)  # fmt: skip
    ended = out.sequences[0, 6 + 4 :]
    assert (ended == 0).all() and len(out.logits) == out.sequences.shape[1] - 6 == out.logprobs.shape[1]
    assert (out.logprobs[0, 4:] == 0).all() and (out.logprobs[0, :4] < 0).all()


def test_log_probabilities_keep_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "process", lambda *_: pytest.fail("the step left the graph at its logits"))
    out = run(shared(NAME), tokens(3, 6), eos_token_id=None, return_dict_in_generate=True, output_logprobs=True)
    assert set(out) == {"sequences", "logprobs"} and out.logprobs.shape == out.sequences[:, 6:].shape
    assert out.logprobs.dtype is torch.float32 and (out.logprobs < 0).all()


def test_without_outputs_there_is_only_the_sequence() -> None:
    out = run(shared(NAME), tokens(1, 6), return_dict_in_generate=True)
    assert out.keys() == ("sequences",) and torch.equal(out.sequences, run(shared(NAME), tokens(1, 6)))


class Avoid(transformers.LogitsProcessor):
    """Bans the last token from coming again; keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.clone())
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def test_a_processor_of_the_user_sees_what_transformers_shows_it() -> None:
    lengths, ids = (2, 6, 4), tokens(3, 6)
    mask = torch.tensor([[0] * (6 - n) + [1] * n for n in lengths])
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours, theirs = Avoid(), Avoid()
    a = shared(NAME).generate(ids * mask, logits_processor=[ours], **options)
    b = oracle(NAME).generate(ids * mask, logits_processor=transformers.LogitsProcessorList([theirs]), **options)
    assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(ours.seen, theirs.seen, strict=True))


class Sum(transformers.StoppingCriteria):
    """Ends a row whose tokens sum up to a multiple of seven."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        return input_ids.sum(1) % 7 == 0


def test_a_criterion_of_the_user_ends_rows() -> None:
    criteria = transformers.StoppingCriteriaList([Sum()])
    ours, theirs = both(tokens(5, 6), eos_token_id=1, stopping_criteria=criteria)  # transformers pads beside eos only
    assert torch.equal(ours, theirs)
    assert (ours[:, -1] == 0).any(), "the criterion never acted"


def test_prefix_allowed_tokens() -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [(int(ids[-1]) * 3 + row + j) % 125 + 3 for j in range(5)]

    ours, theirs = both(tokens(3, 6), prefix_allowed_tokens_fn=allowed, eos_token_id=None)
    assert torch.equal(ours, theirs)


def test_stop_strings() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(STORIES)
    ids = torch.tensor([[1, 403, 407, 261, 378]])
    ours = AutoModelForCausalLM.from_pretrained(STORIES, device_map="cpu", progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(STORIES)
    options = {"stop_strings": ["named Lily", "park."], "tokenizer": tokenizer, "max_new_tokens": 60}
    a, b = run(ours, ids, **options), run(theirs, ids, **options)
    assert torch.equal(a, b) and tokenizer.decode(a[0]).endswith("named Lily")
    with pytest.raises(ValueError, match="tokenizer=tokenizer"):
        run(ours, ids, stop_strings="Lily")


class Keeps:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[list] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_is_given_the_prompt_and_each_token() -> None:
    ours, theirs = Keeps(), Keeps()
    a, b = run(shared(NAME), tokens(1, 6), streamer=ours), run(oracle(NAME), tokens(1, 6), streamer=theirs)
    assert ours.values == theirs.values and ours.ended == theirs.ended == 1
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="one row"):
        run(shared(NAME), tokens(2, 6), streamer=Keeps())


def test_max_time_ends_it() -> None:
    begin = time.monotonic()
    out = run(shared(NAME), tokens(1, 6), max_new_tokens=100_000, max_time=0.2, eos_token_id=None)
    assert 7 <= out.shape[1] < 100_000 and time.monotonic() - begin < 30


def changed(tmp_path: Path, **values) -> Path:
    """The checkpoint with another generation_config.json."""
    for file in folder(NAME).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return tmp_path


def test_the_checkpoints_generation_config_counts(tmp_path: Path, free: Tensor) -> None:
    eos = [int(free[0, 4]), int(free[1, 7])]
    path = changed(tmp_path, eos_token_id=eos, pad_token_id=5, max_new_tokens=12, repetition_penalty=1.2)
    ours = AutoModelForCausalLM.from_pretrained(path, device_map="cpu", progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = tokens(3, 6)
    a = ours.generate(ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(a, theirs.generate(ids, attention_mask=torch.ones_like(ids)))
    assert a.shape[1] <= 18
    longer = ours.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, max_new_tokens=25)
    assert longer.shape[1] == 31, "an argument counts more than the file"


def test_the_checkpoint_asks_for_sampling(tmp_path: Path) -> None:
    path = changed(tmp_path, do_sample=True, temperature=0.7, top_k=11, max_new_tokens=15)
    model = AutoModelForCausalLM.from_pretrained(path, device_map="cpu", progress=False)
    ids = tokens(1, 6)
    drawn = {tuple(model.generate(ids, seed=seed)[0].tolist()) for seed in range(4)}
    assert len(drawn) == 4
    assert torch.equal(model.generate(ids, do_sample=False), run(oracle(NAME), ids, max_new_tokens=15))


def test_the_users_config_is_not_changed() -> None:
    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    shared(NAME).generate(tokens(1, 4), generation_config=config, max_new_tokens=5, eos_token_id=[4])
    assert config == GenerationConfig(max_new_tokens=3, do_sample=False)


ONE = tokens(1, 4)


@pytest.mark.parametrize("inputs, options, says", [
    (ONE, {"max_new_tokenz": 4}, "max_new_tokenz.*max_new_tokens"),
    (ONE, {"token_type_ids": ONE}, "token_type_ids"),
    (ONE, {"num_beam_groups": 2}, "num_beam_groups=2 is not supported"),
    (ONE, {"num_return_sequences": 2}, "num_return_sequences=2"),
    (ONE, {"max_new_tokens": 0}, "max_new_tokens=0"),
    (ONE, {"do_sample": True, "temperature": -1.0}, "temperature=-1.0"),
    (ONE, {"input_ids": ONE}, "inputs and input_ids"),
    (ONE, {"attention_mask": torch.ones(1, 3)}, r"attention_mask.*\(1, 3\)"),
    (ONE, {"attention_mask": torch.zeros(1, 4)}, "row 0 of input_ids has no token"),
    (ONE, {"max_length": 4}, "max_length=4"),
    (torch.tensor([[5, 128]]), {}, r"input_ids\[0\]=128.*0 to 127"),
    (torch.tensor([[5, -1]]), {}, r"input_ids\[0\]=-1"),
    (torch.tensor([[0, 0], [5, 6]]), {"pad_token_id": 0}, "row 0 of input_ids has no token"),
    (torch.tensor([5, 6]), {}, r"shape \[batch, length\]"),
    (torch.tensor([[0.5, 1.0]]), {}, "integer tensor"),
    (torch.empty(0, 4, dtype=torch.long), {}, "no row"),
    (torch.empty(1, 0, dtype=torch.long), {"max_new_tokens": 2}, "row 0 of input_ids has no token"),
    ([[5, 6]], {}, "integer tensor.*a list"),
    (ONE, {"attention_mask": [[1, 1, 1, 1]]}, "attention_mask must be a tensor.*a list"),
    (None, {"attention_mask": torch.ones(1, 1)}, "attention_mask needs the input_ids"),
    (None, {"bos_token_id": None}, "input_ids"),
])  # fmt: skip
def test_what_is_refused(inputs: object, options: dict, says: str) -> None:
    model = shared(NAME)
    with pytest.raises(ValueError, match=says):
        model.generate(inputs, **options)
    assert run(model, ONE).shape == (1, 24), "the model still works"


def test_nothing_starts_from_the_beginning_of_a_text() -> None:
    model = load(NAME)
    assert torch.equal(
        model.generate(max_new_tokens=5, do_sample=False), run(model, torch.tensor([[1]]), max_new_tokens=5)
    )


def test_a_prompt_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="meta device"):
        shared("llama").generate(torch.zeros(1, 3, dtype=torch.int64, device="meta"), max_new_tokens=2)
