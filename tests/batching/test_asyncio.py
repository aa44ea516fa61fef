"""Results in event loops: of any thread, of several loops, and of loops that end early."""

import asyncio
import threading

import pytest

from cuformers.auto.batching.output import GenerationOutput, RequestStatus
from tests.batching.fake import FakeEngine, answer, manager_of
from tests.batching.test_manager import SOON, taken


def test_awaiting_results() -> None:
    async def ask(manager) -> list[GenerationOutput]:
        names = [manager.add_request([5 + i]) for i in range(30)]
        return await asyncio.gather(*(manager.result(n) for n in names))

    with manager_of(FakeEngine()) as manager:
        got = asyncio.run(ask(manager))
    assert [o.generated_tokens for o in got] == [answer([5 + i], 5) for i in range(30)]


def test_streams_side_by_side() -> None:
    async def read(manager, token: int) -> list[list[int]]:
        name = manager.add_request([token], max_new_tokens=20, streaming=True)
        return [o.generated_tokens async for o in manager.stream(name)]

    async def ask(manager) -> list[list[list[int]]]:
        return await asyncio.gather(*(read(manager, 5 + i) for i in range(10)))

    with manager_of(FakeEngine(rows=3)) as manager:
        got = asyncio.run(ask(manager))
    assert got == [[answer([5 + i], n) for n in range(1, 21)] for i in range(10)]


def test_loops_of_several_threads() -> None:
    got: dict[int, list[list[int]]] = {}

    async def ask(number: int) -> None:
        names = [manager.add_request([3 + number, 5 + i], streaming=i % 2 == 0) for i in range(10)]
        outputs = await asyncio.gather(*(manager.result(n) for n in names))
        got[number] = [o.generated_tokens for o in outputs]

    with manager_of(FakeEngine()) as manager:
        threads = [threading.Thread(target=asyncio.run, args=(ask(n),)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    assert got == {n: [answer([3 + n, 5 + i], 5) for i in range(10)] for n in range(6)}


def test_a_handler_before_and_after_the_submission() -> None:
    async def ask(manager) -> list[GenerationOutput]:
        outputs: list[GenerationOutput] = []
        manager.register_result_handler("early", outputs.append)
        manager.add_request([5], "early", streaming=True)
        await manager.result(manager.add_request([7], "other"))
        while not (outputs and outputs[-1].is_finished()):
            await asyncio.sleep(0.001)
        manager.add_request([6], "late")
        while manager._outbox.find("late") is not None:
            await asyncio.sleep(0.001)
        manager.register_result_handler("late", outputs.append)
        await asyncio.sleep(0.01)
        return outputs

    with manager_of(FakeEngine()) as manager:
        got = asyncio.run(asyncio.wait_for(ask(manager), SOON))
        assert manager.get_result(timeout=0.01) is None
    assert [len(o.generated_tokens) for o in got] == [1, 2, 3, 4, 5, 5]
    assert got[-1].request_id == "late" and got[-1].generated_tokens == answer([6], 5)


def test_a_handler_that_fails_is_alone() -> None:
    async def ask(manager) -> tuple[GenerationOutput, list[str]]:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context["exception"])))

        def fail(output: GenerationOutput) -> None:
            raise KeyError("mine")

        manager.register_result_handler("bad", fail)
        manager.add_request([5], "bad", streaming=True)
        return await manager.result(manager.add_request([6])), said

    with manager_of(FakeEngine()) as manager:
        got, said = asyncio.run(ask(manager))
    assert got.generated_tokens == answer([6], 5) and said and set(said) == {"'mine'"}


def test_whoever_stops_listening_leaves_the_rest_to_others() -> None:
    gate = threading.Semaphore(2)

    async def leave(manager, name: str) -> int:
        async for output in manager.stream(name):
            if len(output.generated_tokens) == 2:
                return 2
        return 0

    with manager_of(FakeEngine(gate=gate)) as manager:
        name = manager.add_request([5], max_new_tokens=6, streaming=True)

        async def ask() -> int:
            stream = manager.stream(name)
            async for output in stream:
                if len(output.generated_tokens) == 2:
                    await stream.aclose()
                    return 2
            return 0

        assert asyncio.run(ask()) == 2
        gate.release(100)
        rest = [o.generated_tokens for o in manager.request_id_iter(name)]
    assert rest == [answer([5], n) for n in range(3, 7)]


def test_a_loop_that_ended_loses_nothing() -> None:
    gate = threading.Semaphore(0)

    async def ask(manager) -> str:
        name = manager.add_request([5])
        manager.register_result_handler(name, lambda output: None)
        return name

    with manager_of(FakeEngine(gate=gate)) as manager:
        name = asyncio.run(ask(manager))
        gate.release(100)
        assert taken(manager, name).generated_tokens == answer([5], 5)
        assert taken(manager, manager.add_request([6])).generated_tokens == answer([6], 5)


def test_a_task_that_is_cancelled_gives_its_result_back() -> None:
    gate = threading.Semaphore(0)

    async def ask(manager) -> str:
        name = manager.add_request([5])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(manager.result(name), 0.05)
        return name

    with manager_of(FakeEngine(gate=gate)) as manager:
        name = asyncio.run(ask(manager))
        gate.release(100)
        assert taken(manager, name).generated_tokens == answer([5], 5)


def test_a_hard_stop_ends_whoever_awaits() -> None:
    gate = threading.Semaphore(0)

    async def ask(manager) -> list[GenerationOutput]:
        names = [manager.add_request([5 + i]) for i in range(5)]
        asking = asyncio.gather(*(manager.result(n) for n in names))
        await asyncio.sleep(0.02)
        manager.stop(block=False, hard_stop=True)
        gate.release(10)
        return await asking

    manager = manager_of(FakeEngine(rows=1, gate=gate))
    manager.start()
    got = asyncio.run(asyncio.wait_for(ask(manager), SOON))
    assert all(o.status is RequestStatus.CANCELLED for o in got)
    manager.join(SOON)


def test_an_unknown_id_is_not_awaited() -> None:
    with manager_of(FakeEngine()) as manager, pytest.raises(ValueError, match="unknown"):
        asyncio.run(manager.result("nobody"))
