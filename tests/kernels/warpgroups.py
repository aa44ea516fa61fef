"""Runs the text of a Gluon kernel on the CPU, which Triton's interpreter does not: tensors are torch's, the partitions
of a program are threads, and barriers make them wait.

It shows what the text says (who waits for whom, which tile, which mask), not what the compiler makes of it: layouts,
fences and the order of asynchronous products mean nothing here.
"""

import ast
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DEADLOCK = 20.0
"""Seconds after which a wait has failed."""


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.bytes = self.missing = self.count = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def add(self, *, arrivals: int = 0, expected: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += expected
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == self.bytes == 0:
                self.phase ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != parity, timeout=DEADLOCK):
                raise TimeoutError("a barrier's phase never ended")


class Int(int):
    """A scalar that was loaded."""

    def to(self, dtype: torch.dtype) -> "Int":
        del dtype
        return self


@dataclass
class Pointer:
    """Elements of a tensor's storage, one or many."""

    storage: Tensor
    at: Any

    @classmethod
    def to(cls, x: Tensor) -> "Pointer":
        return cls(x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0), x.storage_offset())

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.storage.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.storage, self.at + offset)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.storage, self.at[index])


@dataclass
class Shared:
    """Shared memory, or a part of it."""

    data: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Any:
        return self.data[i] if isinstance(self.data, list) else Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def load(self, layout: None) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    if not isinstance(pointer.at, Tensor):
        return Int(pointer.storage[pointer.at] if mask else other)
    at, mask = torch.broadcast_tensors(pointer.at, torch.as_tensor(mask))
    return torch.where(mask, pointer.storage[torch.where(mask, at, 0)], other)


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    at, mask = torch.broadcast_tensors(pointer.at, mask)
    pointer.storage[at[mask]] = value[mask]


def _multiply(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    product = (a.data if isinstance(a, Shared) else a) @ b.data
    return acc + product if use_acc else product


def _copy(source: Tensor, corner: list[int], barrier: Barrier, box: Shared) -> None:
    """A TMA load: zero outside the tensor."""
    (height, width), (row, column) = box.data.shape, corner
    box.data.zero_()
    there = source[max(row, 0) : max(row + height, 0), column : column + width]
    box.data[max(-row, 0) :][: there.shape[0], : there.shape[1]] = there
    barrier.add(expected=-2 * box.data.numel())


def _either(scalars: Callable, tensors: Callable) -> Callable:
    def choose(*values: Any) -> Any:
        some = any(isinstance(v, Tensor) for v in values)
        return tensors(*(torch.as_tensor(v) for v in values)) if some else scalars(*values)

    return choose


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else (yes if condition else no)


@dataclass
class Gpu:
    """What one program sees: the languages' modules, and the errors of its partitions."""

    program: int
    programs: int
    errors: list[BaseException] = field(default_factory=list)

    def scope(self) -> dict[str, Any]:
        """Names that a kernel's modules import."""
        none = "SliceLayout BlockedLayout DotOperandLayout NVMMADistributedLayout NVMMASharedLayout"
        gl = SimpleNamespace(
            **{name: lambda *_: None for name in none.split()}, constexpr=lambda x: x, to_tensor=lambda x: x,
            load=_load, store=_store, where=_where, float32=torch.float32, int64=torch.int64, static_range=range,
            maximum=_either(max, torch.maximum), minimum=_either(min, torch.minimum), cdiv=lambda a, b: -(-a // b),
            exp=torch.exp, exp2=torch.exp2, max=torch.amax, sum=torch.sum, convert_layout=lambda x, _: x,
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            arange=lambda start, end, _: torch.arange(start, end),
            program_id=lambda _: self.program, num_programs=lambda _: self.programs,
            allocate_shared_memory=self._allocate, warp_specialize=self._partitions,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, parity: barrier.wait(parity),
            expect=lambda barrier, size: barrier.add(arrivals=1, expected=size),
            arrive=lambda barrier: barrier.add(arrivals=1),
        )
        waited = {"warpgroup_mma_wait": lambda _, deps: deps[0]}
        waited |= dict.fromkeys(("fence_async_shared", "thread_barrier"), lambda: None)
        tma = SimpleNamespace(async_copy_global_to_shared=_copy)
        tl = SimpleNamespace(
            constexpr=None, exp=torch.exp, erf=torch.erf, maximum=gl.maximum, static_assert=lambda right: None
        )
        products = {"warpgroup_mma": _multiply, "mma_v2": lambda a, b, acc: acc + a @ b}
        return {"gl": gl, "tl": tl, "mbarrier": mbarrier, "tma": tma} | products | waited

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
        if dtype == torch.int64:
            return Shared([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(shape, torch.nan, dtype=dtype))

    def _partitions(self, parts: list[tuple[Callable, tuple]], *_: Any) -> None:
        threads = [threading.Thread(target=self._guarded, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _guarded(self, function: Callable, args: tuple) -> None:
        try:
            function(*args)
        except BaseException as error:
            self.errors.append(error)


def run(modules: list[ModuleType], kernel: str, programs: int, *args: Any, **constants: Any) -> None:
    """Runs all programs of a kernel, one after the other; `modules` in the order of their imports."""
    for program in range(programs):
        scope = Gpu(program, programs).scope()
        for module in modules:
            exec(_plain(module), scope)
        scope[kernel](*args, **constants)


def _plain(module: ModuleType) -> Any:
    """A module's code without its imports, those that a version lacks included, and decorators."""
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Try)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return compile(tree, module.__file__, "exec")
