"""Which requests run. Plain Python, no torch.

A request is admitted when a row of the decode state and pages for its full length are free, in the order of arrival,
so that one that runs can always finish. A step is either a prefill of newly admitted requests or a decode of all that
run.
"""

from collections import deque

from cuformers.engine.pages import PageAllocator
from cuformers.engine.request import Request


class Scheduler:
    """First come, first served over a fixed number of rows and pages."""

    def __init__(self, *, num_slots: int, num_pages: int, page_size: int, max_prefill_tokens: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.page_size = page_size
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def pages_of(self, request: Request) -> int:
        """Pages that a request needs for its full length."""
        return -(-request.max_length // self.page_size)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: it could never run, as it needs more pages than there are.
        """
        need = self.pages_of(request)
        if need > self.pages.num_pages:
            raise ValueError(
                f"a request of {request.max_length} tokens needs {need} pages of the cache, which has "
                f"{self.pages.num_pages}: shorten the prompt or max_new_tokens."
            )
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """The requests to prefill now: in order, while rows, pages and the step's token budget last.

        A prompt that is longer than the budget goes alone.
        """
        admitted: list[Request] = []
        budget = self.max_prefill_tokens
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            if admitted and len(request.context) > budget:
                break
            pages = self.pages.take(self.pages_of(request))
            if pages is None:
                break
            self.waiting.popleft()
            request.pages, request.slot = pages, self._free_slots.pop()
            self.running[request.slot] = request
            budget -= len(request.context)
            admitted.append(request)
        return admitted

    def release(self, request: Request) -> None:
        """Takes back what a finished request held."""
        del self.running[request.slot]
        self.pages.give_back(request.pages)
        self._free_slots.append(request.slot)
        self._free_slots.sort(reverse=True)  # low rows first: decode runs over as few rows as possible
        request.pages, request.slot = [], -1

    def again(self, request: Request) -> None:
        """Puts a running request first in the queue, to be computed anew from its tokens."""
        self.release(request)
        self.waiting.appendleft(request)

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)
