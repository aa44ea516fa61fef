"""The requests that wait for a row, in order. Plain Python, no torch."""

from collections.abc import Iterator
from heapq import heappop, heappush

from cuformers.engine.job import Job


class WaitingQueue:
    """A queue by priority, then by arrival; some go before all others."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, tuple[int, int], Job]] = []  # no two orders are equal, so jobs are not compared
        self._members: set[Job] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._members)

    def push(self, job: Job, *, first: bool = False) -> None:
        """Adds a job; `first` puts it before all that were not."""
        self._members.add(job)
        heappush(self._heap, (not first, job.order, job))

    def discard(self, job: Job) -> None:
        """Takes out a job for good, if it is there."""
        self._members.discard(job)

    @property
    def head(self) -> Job | None:
        """The next one."""
        while self._heap and self._heap[0][-1] not in self._members:
            heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Job:
        """Takes out the next one."""
        job = self.head
        assert job is not None, "nothing waits"
        heappop(self._heap)
        self._members.remove(job)
        return job
