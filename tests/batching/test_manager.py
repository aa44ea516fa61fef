"""The manager over an engine without a model: answers, failures that stay alone, ends, and whoever waits for them."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from queue import Full

import pytest
import torch

from cuformers.auto.batching.output import GenerationOutput, RequestStatus
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig
from cuformers.generation.seeds import row_seed
from tests.batching.fake import VOCABULARY, FakeEngine, answer, manager_of, needs_logprobs
from tests.paths import ROOT

SOON = 20.0
"""Seconds that a thread gets to do what it should do at once."""


class Letters:
    """A tokenizer: token 3 is "a", and so on around the alphabet."""

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        return "".join(chr(97 + (t - 3) % 26) for t in token_ids)


def taken(manager, request_id: str | None = None) -> GenerationOutput:
    output = manager.get_result(request_id, timeout=SOON)
    assert output is not None
    return output


def until(holds) -> None:
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def test_answers_come_with_all_they_should_have() -> None:
    with manager_of(FakeEngine()) as manager:
        before = time.perf_counter()
        name = manager.add_request([5, 6, 7], record_timestamps=True)
        got = taken(manager, name)
    assert name == got.request_id == "req_0"
    assert got.prompt_ids == [5, 6, 7] and got.generated_tokens == answer([5, 6, 7], 5)
    assert got.status is RequestStatus.FINISHED and got.is_finished() and got.error is None
    assert got.finish_reason == "length" and got.logprobs == []
    assert got.timestamps is not None and len(got.timestamps) == 5
    times = [before, got.created_time, got.lifespan[0], *got.timestamps, got.lifespan[1], time.perf_counter()]
    assert times == sorted(times)


def test_more_requests_than_rows() -> None:
    engine = FakeEngine(rows=3)
    prompts = [[3 + i % 20, 4 + i // 20] for i in range(50)]
    with manager_of(engine) as manager:
        names = manager.add_requests(prompts, max_new_tokens=7)
        got = {output.request_id: output for output in (taken(manager) for _ in prompts)}
    assert list(names) == [f"req_{i}" for i in range(50)] and got.keys() == set(names)
    assert all(got[n].generated_tokens == answer(p, 7) for n, p in zip(names, prompts))
    assert engine.most_running == 3


def test_each_request_has_its_own_options() -> None:
    free = answer([9, 9], 30)
    eos = free[4]
    with manager_of(FakeEngine()) as manager:
        a = manager.add_request([9, 9], max_new_tokens=2)
        b = manager.add_request([9, 9], max_new_tokens=30, eos_token_id=[eos, 1])
        c = manager.add_request([9, 9], generation_config=GenerationConfig(max_new_tokens=9, do_sample=True, top_k=4))
        d = manager.add_request([9, 9], None, 8, temperature=0.5, do_sample=True, seed=11)
        got = {n: taken(manager, n) for n in (a, b, c, d)}
    assert got[a].generated_tokens == free[:2]
    end = free.index(eos) + 1
    assert got[b].generated_tokens == free[:end] and got[b].finish_reason == "stop"
    assert len(got[c].generated_tokens) == 9 and len(got[d].generated_tokens) == 8


def test_stop_strings_and_time_end_a_request() -> None:
    text = Letters().decode(answer([4, 8], 40))
    word = text[10:13]
    with manager_of(FakeEngine()) as manager:
        a = manager.add_request([4, 8], max_new_tokens=40, stop_strings=word, tokenizer=Letters())
        b = manager.add_request([4, 8], max_new_tokens=40, max_time=1e-9)
        stopped, late = taken(manager, a), taken(manager, b)
    end = text.index(word) + 3
    assert Letters().decode(stopped.generated_tokens) == text[:end] and stopped.finish_reason == "stop"
    assert len(late.generated_tokens) == 1 and late.status is RequestStatus.FINISHED


def test_a_stop_string_may_begin_in_the_prompt() -> None:
    prompt = [4, 8]
    word = Letters().decode([8, answer(prompt, 1)[0]])
    with manager_of(FakeEngine()) as manager:
        name = manager.add_request(prompt, max_new_tokens=9, stop_strings=[word], tokenizer=Letters())
        assert len(taken(manager, name).generated_tokens) == 1


@pytest.mark.parametrize(("prompt", "options", "reason"), [
    ([], {}, "no token"),
    ([3, VOCABULARY], {}, r"input_ids=50 is not possible: allowed is 0 to 49"),
    ([-1, 4], {}, "input_ids=-1"),
    ([3, 4.0], {}, "4.0.*integers"),
    ([3, True], {}, "True.*integers"),
    ([[3, 4]], {}, "request of its own"),
    ("text", {}, "Tokenize the text first"),
    (7, {}, "a list of token ids"),
    ([3] * 20, {"max_new_tokens": 1000}, "does not fit"),
    ([3], {"temperature": -1.0}, "temperature=-1.0"),
    ([3], {"num_beams": 4}, "num_beams=4.*Use generate"),
    ([3], {"num_return_sequences": 2}, "do_sample=True"),
    ([3], {"stop_strings": "x"}, "tokenizer=tokenizer"),
    ([3], {"suppress_tokens": [VOCABULARY]}, "suppress_tokens"),
    ([3], {"bad_words_ids": [[1, 99]]}, "bad_words_ids"),
    ([3], {"output_scores": True}, "output_scores=True"),
    ([3], {"do_sample": True, "seed": [1, 2]}, "seed"),
])  # fmt: skip
def test_a_request_that_cannot_run_fails_alone(prompt, options, reason: str) -> None:
    engine = FakeEngine()
    with manager_of(engine) as manager:
        good = manager.add_request([5])
        bad = manager.add_request(prompt, **options)
        later = manager.add_request([6])
        failed = taken(manager, bad)
        assert taken(manager, good).generated_tokens == answer([5], 5)
        assert taken(manager, later).generated_tokens == answer([6], 5)
    assert failed.status is RequestStatus.FAILED and failed.generated_tokens == [] and failed.request_id == bad
    assert failed.error is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(failed.error)


def test_a_prompt_that_fills_max_length_fails_alone() -> None:
    with manager_of(FakeEngine()) as manager:
        manager.set_options(GenerationConfig(max_length=6), GenerationConfig())
        bad, good = manager.add_requests([[5] * 6, [5] * 4])
        assert "max_length=6" in (taken(manager, bad).error or "")
        assert taken(manager, good).generated_tokens == answer([5] * 4, 2)


def test_a_fault_of_the_program_raises_at_once() -> None:
    with manager_of(FakeEngine()) as manager:
        with pytest.raises(ValueError, match=r"'max_new_token' is not an option.*max_new_tokens"):
            manager.add_request([5], max_new_token=4)
        with pytest.raises(ValueError, match="streamer"):
            manager.add_request([5], streamer=None)
        manager.add_request([5], "mine")
        with pytest.raises(ValueError, match="request_id='mine' is in use"):
            manager.add_request([6], "mine")
        assert taken(manager, "mine").generated_tokens == answer([5], 5)
        with pytest.raises(ValueError, match="unknown"):
            manager.get_result("mine")
        manager.add_request([6], "mine")  # free again
        assert taken(manager, "mine").generated_tokens == answer([6], 5)


def test_the_callers_config_is_neither_changed_nor_watched() -> None:
    config = GenerationConfig(max_new_tokens=4, eos_token_id=-1)
    before = config.to_dict()
    with manager_of(FakeEngine()) as manager:
        manager.set_options(config, GenerationConfig())
        config.max_new_tokens = 9
        name = manager.add_request([5])
        assert len(taken(manager, name).generated_tokens) == 4
    assert config.to_dict() == {**before, "max_new_tokens": 9}


def test_children_are_answers_of_their_own() -> None:
    engine = FakeEngine()
    with manager_of(engine, do_sample=True, num_return_sequences=3, seed=5) as manager:
        name = manager.add_request([5, 6])
        family = [name, f"{name}__child#0", f"{name}__child#1"]
        got = [taken(manager, n) for n in family]
    assert [o.request_id for o in got] == family
    assert all(o.generated_tokens == answer([5, 6], 5) for o in got)


def test_draws_depend_on_the_seeds_as_in_generate() -> None:
    engine, config = FakeEngine(), ContinuousBatchingConfig(seed=3)
    with manager_of(engine, config, do_sample=True, num_return_sequences=2) as manager:
        manager.add_requests([[5], [6]], seed=9)
        manager.add_request([5])
        manager.add_request([5], seed=[7, 8])
        manager.add_request([5])
        manager.stop()
    seeds = [request.sampling.seed for request in engine.added]
    assert seeds == [row_seed(9, i) for i in range(4)] + [row_seed(3, i) for i in (0, 1)] + [7, 8] + [
        row_seed(3, i) for i in (2, 3)
    ]


def test_groups_are_shared_by_requests_that_process_alike() -> None:
    engine = FakeEngine()
    with manager_of(engine) as manager:
        manager.add_request([5])
        manager.add_request([5], do_sample=True, temperature=0.3, top_p=0.5, seed=1, repetition_penalty=1.2)
        manager.add_request([5], no_repeat_ngram_size=2)
        manager.add_request([5, 6, 7], no_repeat_ngram_size=2, max_new_tokens=9, do_sample=True)
        manager.add_request([5], no_repeat_ngram_size=3)
        manager.add_request([5], forced_eos_token_id=4)
        manager.add_request([5], forced_eos_token_id=4, max_new_tokens=9)
        manager.add_request([5], do_sample=True, typical_p=0.5)
        manager.add_request([5], do_sample=True, typical_p=0.5, temperature=0.5)
        manager.stop()
    groups = [request.group for request in engine.added]
    assert groups[0] is groups[1] is None
    assert groups[2] is groups[3] is not None
    assert len({id(g) for g in groups}) == 7


@needs_logprobs
def test_log_probabilities() -> None:
    with manager_of(FakeEngine(), ContinuousBatchingConfig(return_logprobs=True)) as manager:
        got = taken(manager, manager.add_request([5]))
    with manager_of(FakeEngine()) as manager:
        one = taken(manager, manager.add_request([5], output_logprobs=True))
        none = taken(manager, manager.add_request([5]))
    assert got.logprobs == one.logprobs == [-float(t) for t in answer([5], 5)] and none.logprobs == []


def test_streaming_gives_each_token_once() -> None:
    with manager_of(FakeEngine()) as manager:
        name = manager.add_request([5], max_new_tokens=6, streaming=True)
        other = manager.add_request([6], max_new_tokens=6)
        outputs = list(manager.request_id_iter(name))
        assert taken(manager, other).generated_tokens == answer([6], 6)
    assert [o.generated_tokens for o in outputs] == [answer([5], n) for n in range(1, 7)]
    assert [o.status for o in outputs] == [RequestStatus.DECODING] * 5 + [RequestStatus.FINISHED]


def test_iterating_ends_with_the_manager() -> None:
    manager = manager_of(FakeEngine())
    manager.start()
    names = manager.add_requests([[5 + i] for i in range(20)])
    manager.stop(block=False)
    assert {o.request_id for o in manager} == set(names)
    assert manager.get_result() is None


def test_results_for_others_stay() -> None:
    with manager_of(FakeEngine()) as manager:
        a, b = manager.add_requests([[5], [6]])
        assert taken(manager, b).request_id == b
        assert taken(manager).request_id == a
        assert manager.get_result(timeout=0.01) is None


def test_waiting_costs_nothing() -> None:
    with manager_of(FakeEngine()) as manager:
        taken(manager, manager.add_request([5]))
        waiter = threading.Thread(target=manager.get_result)
        waiter.start()
        begin = time.process_time()
        time.sleep(0.5)
        spent = time.process_time() - begin
        manager.stop()
        waiter.join(SOON)
    assert not waiter.is_alive() and spent < 0.1


def test_cancelling_what_waits_and_what_runs() -> None:
    gate = threading.Semaphore(3)
    engine = FakeEngine(rows=1, gate=gate)
    with manager_of(engine) as manager:
        runs, waits = manager.add_requests([[5], [6]], max_new_tokens=100)
        until(lambda: engine.steps == 3)
        assert manager.cancel_request(runs) and manager.cancel_request(waits)
        gate.release()
        got = [taken(manager, n) for n in (runs, waits)]
        assert [o.status for o in got] == [RequestStatus.CANCELLED] * 2
        assert got[0].generated_tokens == answer([5], len(got[0].generated_tokens)) and got[1].generated_tokens == []
        assert all(o.error and "cancelled" in o.error for o in got)
        assert not manager.cancel_request(runs) and not manager.cancel_request("nobody")
        gate.release(10)
        assert taken(manager, manager.add_request([7])).generated_tokens == answer([7], 5)


def test_cancelling_while_streaming() -> None:
    with manager_of(FakeEngine()) as manager:
        for round_ in range(20):
            name = manager.add_request([5 + round_], max_new_tokens=900, streaming=True)
            outputs = []
            for output in manager.request_id_iter(name):
                outputs.append(output)
                if len(outputs) == 3:
                    manager.cancel_request(name)
            assert outputs[-1].status in (RequestStatus.CANCELLED, RequestStatus.FINISHED)
            lengths = [len(o.generated_tokens) for o in outputs]
            assert lengths == sorted(lengths) and lengths[:3] == [1, 2, 3]
            assert outputs[-1].generated_tokens == answer([5 + round_], lengths[-1])


def test_cancelling_before_the_start() -> None:
    manager = manager_of(FakeEngine())
    name = manager.add_request([5])
    assert manager.cancel_request(name)
    got = manager.get_result(name)
    assert got is not None and got.status is RequestStatus.CANCELLED


def test_requests_before_the_start_run_after_it() -> None:
    manager = manager_of(FakeEngine())
    name = manager.add_request([5])
    assert manager.get_result(name, timeout=0.01) is None and not manager.is_running()
    manager.start()
    assert taken(manager, name).generated_tokens == answer([5], 5)
    manager.stop()


def test_many_threads_at_once() -> None:
    engine = FakeEngine(rows=8)
    wrong: list[str] = []

    def client(number: int) -> None:
        for i in range(20):
            prompt = [3 + number, 3 + i]
            got = manager.get_result(manager.add_request(prompt, max_new_tokens=3 + i % 5), timeout=SOON)
            if got is None or got.generated_tokens != answer(prompt, 3 + i % 5):
                wrong.append(f"{number}.{i}")

    with manager_of(engine) as manager:
        threads = [threading.Thread(target=client, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    assert wrong == [] and not any(t.is_alive() for t in threads)


def test_a_full_queue_refuses() -> None:
    gate = threading.Semaphore(0)
    engine = FakeEngine(rows=1, gate=gate)
    config = ContinuousBatchingConfig(max_queue_size=3)
    with manager_of(engine, config) as manager:
        names = manager.add_requests([[5], [6]])
        with pytest.raises(Full, match="max_queue_size=3"):
            manager.add_requests([[7], [8]])
        names.append(manager.add_request([7]))
        with pytest.raises(Full, match="3 requests wait"):
            manager.add_request([8], "late")
        bad = manager.add_request([])  # fails by itself, needs no room
        assert taken(manager, bad).status is RequestStatus.FAILED
        gate.release()  # the first one's first token makes room
        until(lambda: engine.steps == 1)
        gate.release(100)
        got = [taken(manager, n) for n in names]
        late = taken(manager, manager.add_request([8], "late"))
    assert [o.generated_tokens for o in got] == [answer([t], 5) for t in (5, 6, 7)]
    assert late.generated_tokens == answer([8], 5)


def test_stop_finishes_what_was_submitted() -> None:
    manager = manager_of(FakeEngine(rows=2))
    manager.start()
    names = manager.add_requests([[5 + i] for i in range(10)])
    manager.stop()
    assert not manager.is_running()
    assert all(taken(manager, n).status is RequestStatus.FINISHED for n in names)
    with pytest.raises(RuntimeError, match="takes no requests: the manager was stopped"):
        manager.add_request([5])


def test_a_hard_stop_cancels_and_nobody_waits_for_ever() -> None:
    gate = threading.Semaphore(0)
    engine = FakeEngine(rows=1, gate=gate)
    manager = manager_of(engine)
    manager.start()
    names = manager.add_requests([[5], [6], [7]], max_new_tokens=100)
    got: dict[str, GenerationOutput | None] = {}

    def wait(name: str) -> None:
        got[name] = manager.get_result(name)

    threads = [threading.Thread(target=wait, args=(n,)) for n in names]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.running) == 1)
    manager.stop(block=False, hard_stop=True)
    with pytest.raises(RuntimeError, match="stopping"):
        manager.add_request([8])
    gate.release(3)
    manager.join(SOON)
    for thread in threads:
        thread.join(SOON)
    assert all(o is not None and o.status is RequestStatus.CANCELLED and o.error for o in got.values())
    assert len(got) == 3 and not engine.running and not engine.waiting


def test_stopping_what_never_started_cancels() -> None:
    manager = manager_of(FakeEngine())
    name = manager.add_request([5])
    manager.stop()
    got = manager.get_result(name)
    assert got is not None and got.status is RequestStatus.CANCELLED and got.error


def test_a_late_join_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    gate = threading.Semaphore(0)
    manager = manager_of(FakeEngine(gate=gate))
    manager.start()
    manager.add_request([5])
    manager.stop(timeout=0.05)
    assert "has not stopped within 0.05 s" in capsys.readouterr().err and manager.is_running()
    gate.release(100)
    manager.join(SOON)
    assert not manager.is_running()


def test_starting_anew() -> None:
    made: list[FakeEngine] = []
    manager = manager_of(FakeEngine())
    manager._worker._make_engine = lambda: made.append(FakeEngine()) or made[-1]
    for _ in range(2):
        manager.start(warmup=True)
        taken(manager, manager.add_request([5]))
        manager.stop(keep_for_next_session=True)
    assert len(made) == 1 and made[0].warm_ups == 1 and manager.warmed_up
    manager.start()
    manager.stop()
    manager.start()
    assert len(made) == 2
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_an_engine_that_cannot_be_made() -> None:
    manager = manager_of(FakeEngine())
    name = manager.add_request([5])
    good = manager._worker._make_engine

    def fail():
        raise ValueError("num_blocks=10000 needs 3 GiB.")

    manager._worker._make_engine = fail
    with pytest.raises(ValueError, match="num_blocks"):
        manager.start()
    assert not manager.is_running() and manager.fault == "ValueError: num_blocks=10000 needs 3 GiB."
    got = manager.get_result(name)
    assert got is not None and got.status is RequestStatus.FAILED and "num_blocks" in (got.error or "")
    manager._worker._make_engine = good
    with manager:
        assert manager.fault is None
        assert taken(manager, manager.add_request([5])).generated_tokens == answer([5], 5)


def test_a_step_that_breaks_fails_what_was_in_flight_only(capsys: pytest.CaptureFixture[str]) -> None:
    gate = threading.Semaphore(2)
    engine = FakeEngine(rows=2, gate=gate)
    with manager_of(engine) as manager:
        names = manager.add_requests([[5], [6], [7]])
        until(lambda: engine.steps == 2)
        engine.broken.append(RuntimeError("an illegal access"))
        gate.release(1)
        got = [taken(manager, n) for n in names]
        assert all(o.status is RequestStatus.FAILED and "an illegal access" in (o.error or "") for o in got)
        assert [len(o.generated_tokens) for o in got] == [2, 2, 0]
        gate.release(100)
        assert manager.is_running() and manager.fault is None
        assert taken(manager, manager.add_request([8])).generated_tokens == answer([8], 5)
    assert "an illegal access" in capsys.readouterr().err


def test_an_engine_that_cannot_be_reset_ends_the_manager() -> None:
    engine = FakeEngine(rows=1)
    engine.broken.append(RuntimeError("device lost"))
    engine.reset_error = RuntimeError("still lost")
    manager = manager_of(engine)
    names = manager.add_requests([[5], [6]])
    manager.start()
    got = [taken(manager, n) for n in names]
    manager.join(SOON)
    assert all(o.status is RequestStatus.FAILED and o.error for o in got)
    assert not manager.is_running() and manager.fault == "RuntimeError: still lost"
    with pytest.raises(RuntimeError, match="still lost"):
        manager.add_request([5])


def test_an_engine_that_stands_still_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "step", lambda self: False)
    with manager_of(FakeEngine()) as manager:
        got = taken(manager, manager.add_request([5]))
    assert got.status is RequestStatus.FAILED and "stands still" in (got.error or "")


def test_a_tokenizer_that_breaks_fails_its_request() -> None:
    class Broken(Letters):
        def decode(self, token_ids: list[int], **kwargs: object) -> str:
            raise KeyError("no such token")

    with manager_of(FakeEngine()) as manager:
        bad = manager.add_request([5], stop_strings="x", tokenizer=Broken())
        good = manager.add_request([6])
        assert taken(manager, good).generated_tokens == answer([6], 5)
        got = taken(manager, bad)
    assert got.status is RequestStatus.FAILED and "no such token" in (got.error or "")


def test_pausing() -> None:
    engine = FakeEngine()
    with manager_of(engine) as manager:
        assert manager.pause(SOON)
        names = manager.add_requests([[5], [6]])
        time.sleep(0.05)
        assert engine.steps == 0
        assert manager.cancel_request(names[1]) and taken(manager, names[1]).status is RequestStatus.CANCELLED
        assert engine.refreshes == 0
        manager.resume()
        assert taken(manager, names[0]).generated_tokens == answer([5], 5)
        assert engine.refreshes == 1  # the weights may have changed
        assert manager.pause(SOON)
        last = manager.add_request([7])
    assert taken(manager, last).generated_tokens == answer([7], 5)  # stopping goes on where it paused


def test_pausing_waits_for_the_step() -> None:
    gate = threading.Semaphore(0)
    engine = FakeEngine(gate=gate)
    with manager_of(engine) as manager:
        name = manager.add_request([5])
        until(lambda: engine.running)
        assert not manager.pause(0.05)
        gate.release()
        assert manager.pause(SOON)
        seen = engine.steps
        gate.release(100)
        time.sleep(0.05)
        assert engine.steps == seen
        manager.resume()
        taken(manager, name)


def test_an_error_inside_the_block_cancels() -> None:
    manager = manager_of(FakeEngine())
    with pytest.raises(KeyError), manager:
        name = manager.add_request([5], max_new_tokens=900)
        raise KeyError
    assert taken(manager, name).status in (RequestStatus.CANCELLED, RequestStatus.FINISHED)
    assert not manager.is_running()


def test_a_forgotten_manager_stops() -> None:
    manager = manager_of(FakeEngine())
    manager.start()
    manager.add_request([5], max_new_tokens=900)
    thread, gone = manager._thread, weakref.ref(manager)
    assert thread is not None
    del manager
    gc.collect()
    assert gone() is None
    thread.join(SOON)
    assert not thread.is_alive()


def test_an_interpreter_ends_with_a_running_manager() -> None:
    code = """
from tests.batching.fake import FakeEngine, manager_of
manager = manager_of(FakeEngine(longest=10**9))
manager.start()
manager.add_request([5], max_new_tokens=10**8)
manager.get_result(timeout=0.1)
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "over\n" and done.stderr == ""


def test_prompts_of_other_kinds() -> None:
    import numpy

    with manager_of(FakeEngine()) as manager:
        names = manager.add_requests([(5, 6), torch.tensor([5, 6]), numpy.array([5, 6]), list(numpy.array([5, 6]))])
        got = [taken(manager, n) for n in names]
    assert all(o.generated_tokens == answer([5, 6], 5) and o.prompt_ids == [5, 6] for o in got)
    assert all(type(t) is int for o in got for t in o.prompt_ids)
