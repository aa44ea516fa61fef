"""Which requests run, and what each step computes. Plain Python, no torch.

A step is one token of every request that decodes, then the next chunks of prompts, then new requests. Pages are handed
out as they are needed; where they run out, the last request in the order of priority and arrival gives up its own, to
be computed anew later. The first in order never gives up anything, so that there is always an end.
"""

import math
from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter

from cuformers.base.errors import bad_argument
from cuformers.engine.block_manager import BlockManager, Hit
from cuformers.engine.job import Job
from cuformers.engine.plan import Chunk, Draft, StepPlan
from cuformers.engine.request import Request
from cuformers.engine.saved import HostPlaces
from cuformers.engine.stats import Stats
from cuformers.engine.waiting import WaitingQueue

WATERMARK = 0.01
"""Share of the pages that a new request leaves free where others run."""


class Planner:
    """Plans the steps of one engine, whose device has a table of rows and one pool of pages."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        max_batch_tokens: int,
        prefix_cache: bool = True,
        watermark: float = WATERMARK,
        lookahead: int = 1,
        host_places: int = 0,
    ) -> None:
        """
        Args:
            num_rows: requests that run at once, at the most; no more than max_batch_tokens are used.
            num_blocks: pages of the cache.
            block_size: tokens of a page.
            windows: for each group of layers how many keys a query sees, its own included; None sees all.
            max_batch_tokens: tokens of a step, at the most.
            prefix_cache: whether requests share the pages of equal prefixes.
            watermark: share of the pages that a new request leaves free where others run.
            lookahead: tokens beyond those of a step that a decoding row has pages for. 1 where the device chooses the
                place of a token's key at the end of the step that samples it.
            host_places: pages that the host has room for copies of: requests that give way leave theirs there.
        """
        self.block_size, self.max_batch_tokens, self.lookahead = block_size, max_batch_tokens, lookahead
        self.drafts = 0
        """Tokens that a decoding row may take in a step beyond one; to be changed while nothing runs. The engine takes
        off `request.computed` those that a row did not take, once it has seen them."""
        self.blocks = BlockManager(
            num_blocks=num_blocks, block_size=block_size, windows=windows, prefix_cache=prefix_cache
        )
        self.host = HostPlaces(host_places)
        self._watermark = math.ceil(watermark * num_blocks)
        self._free_rows = list(range(min(num_rows, max_batch_tokens)))
        self._idle: set[int] = set()
        self._jobs: dict[Request, Job] = {}
        self._waiting = WaitingQueue()
        self._running: list[Job] = []  # by order
        self._refused: tuple[Job, int] | None = None  # the first that waits, and the pages that were not enough for it
        self._arrivals = self._hit_tokens = self._preemptions = 0

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: it could never run.
        """
        assert request not in self._jobs, "a request is added once"
        if not request.prompt:
            raise bad_argument("prompt", request.prompt, "at least one token")
        if request.max_new_tokens < 1:
            raise bad_argument("max_new_tokens", request.max_new_tokens, "at least 1")
        need = self.blocks.most_pages(request.max_length, self.lookahead + self.drafts)
        there = self.blocks.pool.num_blocks
        if need > there:
            raise ValueError(
                f"a request of {request.max_length} tokens needs {need} pages of the cache, which has {there}: "
                "shorten the prompt or max_new_tokens, or give the cache more memory."
            )
        job = self._jobs[request] = Job(request, self._arrivals)
        self._arrivals += 1
        self._waiting.push(job)

    def finish(self, request: Request) -> None:
        """Takes back what a request has that the device has ended, by a token or by length."""
        self._end(request)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is; nothing where it has ended before."""
        row = request.row
        if self._end(request) and row >= 0:
            self._idle.add(row)

    def seen(self, request: Request) -> None:
        """New tokens of a request, which goes on, have come: lets others find its full blocks."""
        job = self._jobs.get(request)
        if job is not None:
            self.blocks.register(job, min(request.computed, request.total))

    def again(self, request: Request) -> None:
        """Puts a running request first in the queue, to be computed anew from its tokens."""
        job = self._jobs[request]
        self._give_up(job)
        self._waiting.push(job, first=True)

    def new_epoch(self) -> None:
        """The weights have changed: no key that was computed before is shared any more."""
        self.blocks.forget(self._running)
        for job in self._jobs.values():
            self._forget_saved(job)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._jobs)

    def requests(self) -> list[Request]:
        """All that wait or run, in the order of their arrival."""
        return list(self._jobs)

    def stats(self) -> Stats:
        """The counters now."""
        pool = self.blocks.pool
        return Stats(
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
        )

    def can_compact(self, num_rows: int) -> bool:
        """Whether all that runs fits into the first `num_rows` rows."""
        return len(self._running) <= num_rows

    def compact(self, num_rows: int) -> list[tuple[int, int]]:
        """Moves all that runs into the first `num_rows` rows: (from, to) for each row that the device is to move.

        It belongs between a plan and its step, after the plan's changes of the table: rows left behind are idle.
        """
        assert self.can_compact(num_rows), f"{len(self._running)} requests do not fit into {num_rows} rows"
        high = [job.request for job in self._running if job.request.row >= num_rows]
        moves = [(request.row, heappop(self._free_rows)) for request in high]
        for request, (source, target) in zip(high, moves):
            request.row = target
            heappush(self._free_rows, source)
        return moves

    def plan(self, settled: bool) -> StepPlan | None:
        """The next step; None where nothing can be computed before more tokens have been seen.

        Args:
            settled: whether every token of the steps so far has been seen. Only then are requests preempted.
        """
        for job in self._running:
            position = self._position(job.request)
            if position >= job.tables.unseen_from:
                self.blocks.drop_unseen(job, position)
        draft = Draft()
        if not self._go_on(draft, settled):
            return StepPlan(wait=True)
        if not draft.preempted:
            self._admit(draft)
        if not (draft.chunks or draft.decodes):
            assert not (settled and self._jobs), "something waits for ever"
            return None
        idle, self._idle = tuple(sorted(self._idle)), set()
        return StepPlan(
            saves=tuple(draft.saves),
            restores=tuple(draft.restores),
            idle=idle,
            admitted=tuple(draft.admitted),
            tables=tuple(draft.tables),
            chunks=tuple(draft.chunks),
            decodes=tuple(sorted(draft.decodes, key=attrgetter("row"))),
            preempted=tuple(draft.preempted),
        )

    def _go_on(self, draft: Draft, settled: bool) -> bool:
        """Plans what runs already; False, with nothing changed, where it has to wait for the tokens in flight."""
        work: list[tuple[Job, int]] = []
        reserved = 0
        left = max(0, self.max_batch_tokens - sum(self._decodes(job) for job in self._running))
        for job in self._running:  # preemption shortens it at the end
            request = job.request
            if request.computed >= request.target:
                count = self._decodes(job)
            else:
                count = self._chunk(request, left)
            if count and self._cover(job, count) > job.tables.num_blocks * self.block_size:
                count = self._with_room(job, count, reserved, draft, settled)
                if count < 0:
                    return False
                reserved += self._missing(job, count)
            if count:
                work.append((job, count))
                if request.computed < request.target:
                    left -= count
        for job, count in work:
            self._compute(job, count, draft)
        return True

    def _decodes(self, job: Job) -> int:
        """Tokens that a request's row computes in a step of decoding: 0 in its prompt, and where it has ended."""
        if job.in_prompt:
            return 0
        if self.drafts:  # the device alone knows how far it is
            return 1 + self.drafts
        return int(job.request.computed < job.end - 1)

    def _position(self, request: Request) -> int:
        """The least position that a request's next query may have."""
        return min(request.computed, request.total - 1) if self.drafts else request.computed

    def _with_room(self, job: Job, count: int, reserved: int, draft: Draft, settled: bool) -> int:
        """As many of the next `count` tokens as there are pages for, or can be got from later requests.

        Args:
            job: whose tokens they are.
            count: tokens, at least one.
            reserved: pages that are available, but planned for others.
            draft: takes the preempted.
            settled: whether preemption is possible.

        Returns:
            0 where the request has to stay as it is, or is preempted itself; -1 where preemption is needed but not
            possible now.
        """
        while True:
            fits = self._fit(job, count, self.blocks.pool.num_available - reserved)
            last = self._running[-1]
            if fits or (last is job and job.in_prompt):
                return fits
            if not settled:
                return -1
            self._preempt(last, draft)
            if last is job:
                return 0

    def _fit(self, job: Job, count: int, pages: int) -> int:
        """As many of the next `count` tokens as so many new pages are enough for."""
        there = (job.tables.num_blocks + pages // self.blocks.num_groups) * self.block_size
        computed, target = job.request.computed, job.request.target
        if computed >= target:  # all or nothing: the device computes every draft
            return count if self._cover(job, count) <= there else 0
        count = min(count, there - computed)
        if count > 0 and self._cover(job, count) > there:  # the token that would be sampled after them has no place
            count = min(count, target - 1 - computed)
        return max(count, 0)

    def _cover(self, job: Job, count: int) -> int:
        """Tokens that a request must have pages for when it computes `count` more."""
        after = job.request.computed + count
        return after if after < job.request.target else min(after + self.lookahead, job.end - 1)

    def _missing(self, job: Job, count: int) -> int:
        """New pages for the next `count` tokens."""
        blocks = self.blocks.blocks(self._cover(job, count)) - job.tables.num_blocks
        return max(blocks, 0) * self.blocks.num_groups

    def _chunk(self, request: Request, left: int) -> int:
        """Tokens of a request's next chunk, out of `left`; it ends with a block, if it can and the context goes on."""
        end = min(request.target, request.computed + left)
        if end < request.target:
            aligned = end - end % self.block_size
            end = aligned if aligned > request.computed else end
        return end - request.computed

    def _compute(self, job: Job, count: int, draft: Draft) -> None:
        """Plans the next `count` tokens of a request, for which there is room."""
        request, start = job.request, job.request.computed
        cover = self._cover(job, count)
        if cover > job.tables.num_blocks * self.block_size:
            draft.tables += self.blocks.grow(job, cover)
        request.computed = start + count
        if start >= request.target:
            draft.decodes.append(request)
            return
        self.blocks.register(job, request.computed)
        final = request.computed == request.target
        reached = len(request.prompt) if request.breakpoint is None else request.target
        draft.chunks.append(Chunk(request=request, start=start, count=count, reached=reached, final=final))

    def _admit(self, draft: Draft) -> None:
        """Gives rows and first chunks to those that wait, in order, while rows, pages and tokens last."""
        left = self.max_batch_tokens - len(draft.decodes) * (1 + self.drafts) - sum(c.count for c in draft.chunks)
        promised = self._promised(self._running) if self._waiting else 0
        while left > 0 and self._free_rows and (job := self._waiting.head) is not None:
            room = self.blocks.pool.num_available - self._watermark - promised if self._running else None
            if room is not None and self._refused is not None and self._refused[0] is job and room <= self._refused[1]:
                return
            hit = self._hit(job)
            need = self.blocks.most_pages(job.request.total + self.lookahead, self.lookahead)
            need -= self.blocks.num_held(hit)
            if room is not None and need > room:
                self._refused = job, room
                return
            self._waiting.pop()
            self._start(job)
            self.blocks.open(job, hit)
            if job.saved is not None:
                draft.restores += self.blocks.restore(job, job.saved)
                self._forget_saved(job)
            self._hit_tokens += job.request.computed
            count = self._fit(job, self._chunk(job.request, left), self.blocks.pool.num_available)
            assert count > 0, "a request was admitted that has no room"
            entries = len(draft.tables)
            self._compute(job, count, draft)
            del draft.tables[entries:]  # the row is written as a whole
            draft.admitted.append(job.request)
            left -= count
            promised += self._promised([job])

    def _hit(self, job: Job) -> Hit:
        """What the cache has for a request; nothing where the host has more."""
        hit = self.blocks.find(job.request)
        if job.saved is None:
            return hit
        if job.saved.tokens > len(hit.nodes) * self.block_size:
            return Hit([], [])
        self._forget_saved(job)
        return hit

    def _forget_saved(self, job: Job) -> None:
        if job.saved is not None:
            self.host.drop(job.saved)
            job.saved = None

    def _promised(self, jobs: Sequence[Job]) -> int:
        """Pages that those of them whose prompts are being computed will still need, where layers see everything."""
        missing = sum(
            self.blocks.blocks(job.request.target + self.lookahead) - job.tables.num_blocks
            for job in jobs if job.in_prompt
        )  # fmt: skip
        return missing * self.blocks.windows.count(None)

    def _start(self, job: Job) -> None:
        request = job.request
        request.row, request.target = heappop(self._free_rows), request.total
        job.end = min(request.limit, request.max_length)
        self._idle.discard(request.row)
        insort(self._running, job, key=attrgetter("order"))

    def _preempt(self, job: Job, draft: Draft) -> None:
        assert len(self._running) > 1, "a request that runs alone has all the pages it needs"
        tokens = min(job.request.computed, job.request.total - 1)
        blocks = [job.tables.block(index) for index in range(self.blocks.blocks(tokens))]
        job.saved, swaps = self.host.save(tokens, blocks)
        draft.saves += swaps
        self._give_up(job)
        self._waiting.push(job)
        self._preemptions += 1
        draft.preempted.append(job.request)

    def _give_up(self, job: Job) -> None:
        """Takes everything from a request that is to wait again."""
        self._idle.add(job.request.row)
        self._leave(job)

    def _end(self, request: Request) -> bool:
        job = self._jobs.pop(request, None)
        if job is None:
            return False
        self._forget_saved(job)
        if request.row >= 0:
            self._leave(job)
        else:
            self._waiting.discard(job)
        return True

    def _leave(self, job: Job) -> None:
        """Takes the row and the pages of a running request. Its full blocks stay cached."""
        request = job.request
        self.blocks.register(job, min(request.computed, request.total - 1))  # the last token may have ended it: no key
        self.blocks.close(job)
        self._running.remove(job)
        heappush(self._free_rows, request.row)
        request.row, request.computed, request.target = -1, 0, 0
