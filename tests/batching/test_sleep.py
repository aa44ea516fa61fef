"""Sleep and wake, changed weights under a running manager, and warming up: nothing is lost, nothing stale is used."""

import threading
import time

import pytest
import torch
from models.checkpoints import load, tokens

from cuformers.auto.batching import sized_engine
from cuformers.auto.batching.output import RequestStatus
from cuformers.base.errors import OutOfDeviceMemory
from cuformers.generation.batching_config import ContinuousBatchingConfig
from tests.batching.fake import FakeEngine, answer, manager_of

SOON = 20.0
CONFIG = ContinuousBatchingConfig(max_requests_per_batch=4, num_blocks=8)
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
LONG = tokens(1, 140, seed=1)[0].tolist()
"""A prompt of two full pages and a bit."""
PROMPTS = [tokens(1, 3 + 5 * i % 17, seed=i)[0].tolist() for i in range(6)]


def alone(model, prompt: list[int], **options) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})[0, len(prompt) :].tolist()


def read_until(manager, request_id: str, count: int) -> None:
    while len(manager.get_result(request_id, SOON).generated_tokens) < count:
        pass


def change(model, *, counted: bool) -> None:
    """Other weights in place: through the parameters, which count their changes, or through `.data`, which don't."""
    with torch.no_grad():
        for parameter in model.parameters():
            target = parameter if counted else parameter.data
            target.copy_(parameter.flip(0))


class Counted:
    """A manager of a tiny model and what its cache has been asked."""

    def __init__(self, manager) -> None:
        self.manager = manager

    def tokens(self, prompt: list[int], count: int = 4) -> list[int]:
        output = self.manager.get_result(self.manager.add_request(prompt, max_new_tokens=count, **GREEDY), SOON)
        assert output.status is RequestStatus.FINISHED, output.error
        return output.generated_tokens

    @property
    def hits(self) -> int:
        return self.manager.stats.hit_tokens


def test_what_is_submitted_while_asleep_waits() -> None:
    engine = FakeEngine()
    with manager_of(engine) as manager:
        manager.sleep()
        manager.sleep()
        first, second = manager.add_requests([[5], [6]])
        assert manager.get_result(first, timeout=0.05) is None
        assert engine.steps == 0
        assert manager.cancel_request(second)
        assert manager.get_result(second, SOON).status is RequestStatus.CANCELLED
        manager.wake()
        manager.wake()
        assert manager.get_result(first, SOON).generated_tokens == answer([5], 5)
    assert engine.told == ["sleep weights=False"] * 2 + ["wake"] * 2


def test_what_runs_goes_on_after_sleep() -> None:
    gate = threading.Semaphore(3)
    engine = FakeEngine(gate=gate)
    with manager_of(engine) as manager:
        name = manager.add_request([5], max_new_tokens=9, streaming=True)
        read_until(manager, name, 2)
        gate.release()
        manager.sleep()
        seen = engine.steps
        gate.release(100)
        time.sleep(0.05)
        assert engine.steps == seen
        manager.wake()
        got = [output.generated_tokens for output in manager.request_id_iter(name)]
    assert got[-1] == answer([5], 9) and [len(tokens) for tokens in got] == list(range(3, 10))


def test_a_pause_outlasts_a_sleep() -> None:
    with manager_of(FakeEngine()) as manager:
        manager.pause()
        manager.sleep()
        assert manager.pause(SOON), "a sleeping engine takes no step"
        name = manager.add_request([5])
        manager.wake()
        assert manager.get_result(name, timeout=0.05) is None
        manager.resume()
        assert manager.get_result(name, SOON).generated_tokens == answer([5], 5)


@pytest.mark.parametrize("hard", [False, True])
def test_stopping_a_sleeper_ends_all_with_a_reason(hard: bool) -> None:
    gate = threading.Semaphore(2)
    engine = FakeEngine(gate=gate)
    manager = manager_of(engine)
    manager.start()
    running = manager.add_request([5], streaming=True)
    read_until(manager, running, 1)
    gate.release()
    manager.sleep()
    waiting = manager.add_request([6])
    manager.stop(hard_stop=hard, keep_for_next_session=True)
    ends = [list(manager.request_id_iter(name))[-1] for name in (running, waiting)]
    assert all(end.status is RequestStatus.CANCELLED and "stopped" in end.error for end in ends)
    assert ends[0].generated_tokens and ends[1].generated_tokens == []
    assert hard or all("slept" in end.error for end in ends)
    with pytest.raises(RuntimeError, match="does not run"):
        manager.wake()


def test_who_cannot_wake_sleeps_on() -> None:
    engine = FakeEngine()
    engine.wake_error = OutOfDeviceMemory("no room.")
    with manager_of(engine) as manager:
        manager.sleep()
        name = manager.add_request([5])
        with pytest.raises(OutOfDeviceMemory, match="no room"):
            manager.wake()
        assert manager.get_result(name, timeout=0.05) is None
        engine.wake_error = None
        manager.wake()
        assert manager.get_result(name, SOON).generated_tokens == answer([5], 5)


def test_an_errand_that_breaks_fails_what_ran_and_tells_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: object) -> None:
        raise RuntimeError("the device is gone")

    gate = threading.Semaphore(1)
    engine = FakeEngine(gate=gate)
    monkeypatch.setattr(engine, "sleep", broken)
    with manager_of(engine) as manager:
        lost = manager.add_request([5], streaming=True)
        read_until(manager, lost, 1)
        gate.release()
        with pytest.raises(RuntimeError, match="the device is gone"):
            manager.sleep()
        gate.release(100)
        end = list(manager.request_id_iter(lost))[-1]
        assert end.status is RequestStatus.FAILED and "the device is gone" in end.error
        assert manager.get_result(manager.add_request([6]), SOON).generated_tokens == answer([6], 5)


def test_nobody_waits_for_a_thread_that_ends() -> None:
    manager = manager_of(FakeEngine())
    for errand in (manager.sleep, manager.wake, manager.update_weights):
        with pytest.raises(RuntimeError, match="start it before"):
            errand()


@pytest.mark.parametrize("before", [True, False])
def test_warming_up_before_the_start_or_after_it(before: bool) -> None:
    engine = FakeEngine()
    manager = manager_of(engine)
    if before:
        manager.warmup()
        assert manager.warmed_up
    with manager:
        manager.warmup()
        assert manager.warmed_up and engine.warm_ups == 1
        manager.sleep()
        assert not manager.warmed_up, "captured steps are gone"
        with pytest.raises(ValueError, match="wake"):
            manager.warmup()
        manager.wake()
        manager.warmup()
        assert engine.warm_ups == 2
        assert manager.get_result(manager.add_request([5]), SOON).generated_tokens == answer([5], 5)
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.warmup()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_the_same_whenever_it_slept(name: str, weights: bool) -> None:
    model = load(name)
    want = [alone(model, prompt, max_new_tokens=60) for prompt in PROMPTS]
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        ids = manager.add_requests(PROMPTS, max_new_tokens=60, streaming=True, **GREEDY)
        for count in (5, 20):
            read_until(manager, ids[0], count)
            manager.sleep(weights=weights)
            assert manager._worker.engine.engine.runner is None, "cache, table and captured steps are free"
            manager.wake()
        got = [list(manager.request_id_iter(i))[-1].generated_tokens for i in ids]
    assert got == want


def test_log_probabilities_of_a_sleeper_come_once() -> None:
    model = load("llama")
    options = {"max_new_tokens": 30, "logprobs": 2, "prompt_logprobs": 1, **GREEDY}
    (want,) = model.generate_batch([LONG], None, CONFIG, **options).values()
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        name = manager.add_request(LONG, streaming=True, **options)
        read_until(manager, name, 7)
        manager.sleep()
        manager.wake()
        got = list(manager.request_id_iter(name))[-1]
    torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs))
    torch.testing.assert_close(torch.tensor(got.prompt_logprobs[1:]), torch.tensor(want.prompt_logprobs[1:]))
    assert len(got.top_logprobs) == 30 and len(got.prompt_logprobs) == len(LONG)


def test_a_sleep_forgets_the_cache() -> None:
    model = load("llama")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        counted = Counted(manager)
        first = counted.tokens(LONG)
        assert counted.tokens(LONG) == first and counted.hits == 128
        manager.sleep()
        change(model, counted=False)
        manager.wake()
        assert counted.tokens(LONG) == alone(model, LONG, max_new_tokens=4) and counted.hits == 0


def test_changes_that_nobody_counts_are_told() -> None:
    model = load("llama")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        counted = Counted(manager)
        counted.tokens(LONG)
        assert manager.pause(SOON)
        change(model, counted=False)
        manager.update_weights()
        manager.resume()
        assert counted.tokens(LONG) == alone(model, LONG, max_new_tokens=4) and counted.hits == 0


def test_counted_changes_are_noticed_when_work_comes() -> None:
    model = load("llama")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        counted = Counted(manager)
        counted.tokens(LONG)
        change(model, counted=True)
        assert counted.tokens(LONG) == alone(model, LONG, max_new_tokens=4) and counted.hits == 0


def test_counted_changes_are_noticed_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_engine, "LOOK_EVERY", 1)
    model = load("llama")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        counted = Counted(manager)
        counted.tokens(LONG)
        running = manager.add_request(PROMPTS[0], max_new_tokens=1500, streaming=True, **GREEDY)
        read_until(manager, running, 3)
        change(model, counted=True)
        read_until(manager, running, manager.num_generated_tokens)  # a step has begun since, and looked
        assert counted.tokens(LONG) == alone(model, LONG, max_new_tokens=4) and counted.hits == 0
        manager.cancel_request(running)


@pytest.mark.parametrize("restart", [False, True])
def test_what_runs_goes_on_with_other_weights(restart: bool) -> None:
    model = load("llama")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        name = manager.add_request(LONG, max_new_tokens=40, streaming=True, **GREEDY)
        read_until(manager, name, 9)
        assert manager.pause(SOON)
        so_far = manager._worker._harvest.running
        seen = list(next(iter(so_far.values())).generated)
        change(model, counted=False)
        manager.update_weights(restart=restart)
        manager.resume()
        got = list(manager.request_id_iter(name))[-1].generated_tokens
    assert got[: len(seen)] == seen and len(got) == 40
    anew = alone(model, LONG + seen, max_new_tokens=40 - len(seen))
    assert (got[len(seen) :] == anew) is restart, "only with restart are all keys of the weights now"


def test_warming_up_beside_running_requests() -> None:
    model = load("llama")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG, warmup=False) as manager:
        ids = manager.add_requests(PROMPTS, max_new_tokens=60, streaming=True, **GREEDY)
        read_until(manager, ids[0], 3)
        manager.warmup()
        got = [list(manager.request_id_iter(i))[-1].generated_tokens for i in ids]
    assert got == [alone(model, prompt, max_new_tokens=60) for prompt in PROMPTS]
