"""A device that remembers whose key is in which place of which page, and a host that runs ahead of it.

Every query checks each key that it reads: a page that was shared wrongly, reused early or lost fails at once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cuformers.engine.plan import StepPlan
from cuformers.engine.planner import Planner
from cuformers.engine.request import Request

VOCAB = 3
EOS = 2


def next_token(windows: Sequence[int | None], root: int, context: Sequence[int]) -> int:
    """The model: what follows depends on all that each group of layers sees."""
    return hash((root, *(tuple(context[0 if w is None else max(0, len(context) - w) :]) for w in windows))) % VOCAB


def root_of(request: Request, length: int) -> int:
    """What else the keys depend on, at a length."""
    past = request.breakpoint is not None and length >= request.breakpoint
    return hash((*map(ord, request.cache_salt), -1, *map(ord, request.adapter), -1, past))


def alone(request: Request, windows: Sequence[int | None], stop_after: int | None) -> list[int]:
    """The tokens that a request gets where nothing else runs."""
    tokens: list[int] = []
    while len(tokens) < request.max_new_tokens:
        context = [*request.prompt, *tokens]
        tokens.append(next_token(windows, root_of(request, len(context)), context))
        if tokens[-1] in request.eos or len(tokens) == stop_after:
            break
    return tokens


class Key(NamedTuple):
    """What a place of a page holds."""

    token: int
    digest: int
    """Of all tokens up to this one, and of all else that its key depends on."""


@dataclass
class Row:
    """What the device knows of a request."""

    request: Request
    tokens: list[int]
    root: int
    limit: int
    tables: list[dict[int, int]]
    digests: list[int] = field(default_factory=list)
    """Of the tokens computed so far."""
    busy: bool = False
    slots: list[tuple[int, int] | None] = field(default_factory=list)
    """For each group where the key of the newest token goes."""


class Query(NamedTuple):
    """A token in a step."""

    row: Row
    position: int
    slots: list[tuple[int, int] | None]


class Device:
    """Follows plans to the letter; a row that it believes busy takes part in every step."""

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None], lookahead: int) -> None:
        self.block_size, self.windows, self.lookahead = block_size, windows, lookahead
        self.pages: list[list[Key | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, Row] = {}
        self.epoch = 0

    def launch(self, plan: StepPlan, moves: Sequence[tuple[int, int]]) -> list[tuple[Request, int | None]]:
        """One step: the sampled tokens, with whose they are; None for rows that the device had ended before."""
        self._learn(plan)
        for source, target in moves:
            assert target not in self.rows or not self.rows[target].busy, "a busy row is overwritten"
            self.rows[target] = self.rows.pop(source)
        busy = {i: row for i, row in self.rows.items() if row.busy}
        planned = {(request.row, request) for request in plan.decodes}
        assert {(i, row.request) for i, row in busy.items()} <= planned, "a row was not idled"
        decodes = [self._decode(row) for row in busy.values()]
        chunks = [self._chunk(self.rows[c.row], c.start, c.count) for c in plan.chunks]
        queries = [*decodes, *(query for chunk in chunks for query in chunk)]
        self._write(queries)
        for query in queries:
            self._check(query)
        sampled: dict[Request, int | None] = dict.fromkeys(plan.decodes)
        sampled |= {query.row.request: self._sample(query) for query in decodes}
        for chunk, queries in zip(plan.chunks, chunks):
            known, whole = len(self.rows[chunk.row].tokens), chunk.request.breakpoint is not None
            assert chunk.final == (chunk.start + chunk.count == known)
            assert chunk.reached == (known if whole else len(chunk.request.prompt))
            if chunk.final:
                sampled[chunk.request] = self._sample(queries[-1])
        return list(sampled.items())

    def _learn(self, plan: StepPlan) -> None:
        for i in plan.idle:
            self.rows[i].busy = False
        assert not {*plan.idle} & {r.row for r in plan.admitted}
        for request in plan.admitted:
            context, hit = request.context, next(c.start for c in plan.chunks if c.request is request)
            row = self.rows[request.row] = Row(
                request, context, root_of(request, len(context)), request.limit,
                [{i: p for i, p in enumerate(table) if p is not None} for table in request.tables],
            )  # fmt: skip
            for position in range(hit):
                self._digest(row, position)
        for group, row, index, page in plan.tables:
            assert self.rows[row].request not in plan.admitted
            self.rows[row].tables[group][index] = page

    def _digest(self, row: Row, position: int) -> None:
        assert position == len(row.digests), "tokens are computed in order, once"
        before = row.digests[-1] if row.digests else row.root
        row.digests.append(hash((before, row.tokens[position], self.epoch)))

    def _slots(self, row: Row, position: int) -> list[tuple[int, int] | None]:
        index, offset = divmod(position, self.block_size)
        pages = [table.get(index) for table in row.tables]
        return [None if page is None else (page, offset) for page in pages]

    def _decode(self, row: Row) -> Query:
        position = len(row.tokens) - 1
        self._digest(row, position)
        return Query(row, position, row.slots if self.lookahead else self._slots(row, position))

    def _chunk(self, row: Row, start: int, count: int) -> list[Query]:
        assert not row.busy and count > 0
        for position in range(start, start + count):
            self._digest(row, position)
        return [Query(row, position, self._slots(row, position)) for position in range(start, start + count)]

    def _write(self, queries: Sequence[Query]) -> None:
        written = set()
        for query in queries:
            assert None not in query.slots, "a key has no place"
            for slot in query.slots:
                assert slot is not None and slot not in written, "two keys go to one place"
                written.add(slot)
                page, offset = slot
                self.pages[page][offset] = Key(query.row.tokens[query.position], query.row.digests[query.position])

    def _seen(self, query: Query) -> list[list[Key | None]]:
        row, position = query.row, query.position
        keys = []
        for table, window in zip(row.tables, self.windows):
            first = 0 if window is None else max(0, position - window + 1)
            places = [divmod(p, self.block_size) for p in range(first, position + 1)]
            keys.append([self.pages[table[index]][offset] for index, offset in places])
        return keys

    def _check(self, query: Query) -> None:
        for keys in self._seen(query):
            first = query.position + 1 - len(keys)
            digests = query.row.digests[first : query.position + 1]
            assert [key and key.digest for key in keys] == digests, "a query sees a wrong key"

    def _sample(self, query: Query) -> int:
        row, seen = query.row, self._seen(query)
        token = hash((row.root, *(tuple(key.token for key in keys if key) for keys in seen))) % VOCAB
        row.tokens.append(token)
        row.busy = token not in row.request.eos and len(row.tokens) < row.limit
        row.slots = self._slots(row, len(row.tokens) - 1)
        return token


class Host:
    """The engine's loop, around a planner and a simulated device."""

    def __init__(self, planner: Planner, device: Device, lag: int, stops: dict[Request, int | None]) -> None:
        self.planner, self.device, self.lag, self.stops = planner, device, lag, stops
        self.flights: deque[list[tuple[Request, int | None]]] = deque()
        self.added: list[Request] = []
        self.done: set[Request] = set()
        self.cancelled: set[Request] = set()
        self.compacts = False

    def add(self, request: Request) -> None:
        self.planner.add(request)
        self.added.append(request)

    def cancel(self, request: Request) -> None:
        self.planner.cancel(request)
        if request not in self.done:
            self.done.add(request)
            self.cancelled.add(request)

    def new_epoch(self) -> None:
        self.device.epoch += 1
        self.planner.new_epoch()

    def step(self) -> StepPlan | None:
        settled = not self.flights
        first = min((r for r in self.added if r.row >= 0), key=self._order, default=None)
        plan = self.planner.plan(settled)
        if plan is None or plan.wait:
            assert not settled or not self.planner.busy, "it waits for ever"
            self.collect()
            return plan
        self._check_plan(plan, first, settled)
        self.flights.append(self.device.launch(plan, self._moves()))
        if len(self.flights) > self.lag:
            self.collect()
        return plan

    def _order(self, request: Request) -> tuple[int, int]:
        return request.priority, self.added.index(request)

    def _moves(self) -> list[tuple[int, int]]:
        fits = max(self.planner.num_running, 1)
        return self.planner.compact(fits) if self.compacts and self.planner.can_compact(fits) else []

    def _check_plan(self, plan: StepPlan, first: Request | None, settled: bool) -> None:
        tokens = len(plan.decodes) + sum(chunk.count for chunk in plan.chunks)
        assert 0 < tokens <= self.planner.max_batch_tokens
        assert [r.row for r in plan.decodes] == sorted({r.row for r in plan.decodes})
        assert settled or not plan.preempted, "preempted while tokens are in flight"
        assert not (plan.preempted and plan.admitted), "pages go to a new request, not to the one that lacked them"
        assert not any(r in self.done for r in (*plan.decodes, *plan.admitted, *(c.request for c in plan.chunks)))
        if first is not None:
            planned = {*plan.decodes, *(chunk.request for chunk in plan.chunks)}
            at_end = first.computed >= first.target and first.computed + 1 >= first.limit
            assert first in planned or at_end, "the first in order does not go on"

    def collect(self) -> None:
        if not self.flights:
            return
        for request, token in self.flights.popleft():
            if request in self.done:
                continue
            assert token is not None, "the host goes on with a row that the device has ended"
            self._take(request, token)

    def _take(self, request: Request, token: int) -> None:
        request.generated.append(token)
        if token in request.eos or len(request.generated) == request.max_new_tokens:
            self.done.add(request)
            self.planner.finish(request)
        elif len(request.generated) == self.stops.get(request):
            self.cancel(request)
        elif request.total == request.breakpoint:
            self.planner.again(request)
        else:
            self.planner.seen(request)

    def drain(self) -> None:
        """Steps until nothing is left to do."""
        for _ in range(5000):
            if not self.planner.busy:
                break
            self.step()
            self.check()
        assert not self.planner.busy, "it does not come to an end"
        while self.flights:
            self.collect()
        stats = self.planner.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free + stats.num_cached == stats.num_blocks, "a page leaked"
        self._check_cache()
        for request in self.added:
            tokens = alone(request, self.device.windows, self.stops.get(request))
            if request in self.cancelled:
                tokens = tokens[: len(request.generated)]
            assert request.generated == tokens, "a request got other tokens than it gets alone"

    def _check_cache(self) -> None:
        """Once every page has been overwritten, nothing is left of the tree."""
        blocks = self.planner.blocks
        blocks.pool.give_back([blocks.pool.take() for _ in range(blocks.pool.num_blocks)])
        assert blocks.cache is None or not blocks.cache._top.children, "a node leaked"

    def check(self) -> None:
        """Every page is free, cached, or held for one block of one group."""
        held: dict[int, set[tuple[int, int]]] = {}
        running = [r for r in self.added if r.row >= 0]
        for request in running:
            for group, table in enumerate(request.tables):
                for index, page in enumerate(table):
                    if page is not None:
                        held.setdefault(page, set()).add((group, index))
        assert all(len(uses) == 1 for uses in held.values()), "a page is owned twice"
        stats, pool = self.planner.stats(), self.planner.blocks.pool
        assert all(pool.held(page) for page in held)
        assert stats.num_free + stats.num_cached + len(held) == stats.num_blocks, "a page leaked"
        assert len({r.row for r in running}) == len(running) == stats.num_running
        assert stats.num_running + stats.num_waiting == len([r for r in self.added if r not in self.done])
