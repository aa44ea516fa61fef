"""What comes back from the engine's thread, and who waits for it."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Condition, RLock
from typing import Protocol

from cuformers.auto.batching.tracked import Delivery, Tracked


class Channel(Protocol):
    """Somebody who is given outputs instead of asking for them."""

    def put(self, deliveries: list[Delivery]) -> bool:
        """Takes outputs, in the engine's thread; False where nobody is there any more."""
        ...


class Outbox:
    """Usable from any thread. A request's outputs stay here until they are taken, or go to the request's channel."""

    def __init__(self) -> None:
        self._news = Condition(RLock())
        self._live: dict[str, Tracked] = {}
        self._kept: dict[str, deque[Delivery]] = {}
        self._channels: dict[str, Channel] = {}
        self._closed = True

    def open(self) -> None:
        """Outputs may come."""
        with self._news:
            self._closed = False

    def close(self) -> None:
        """No output can come any more, and nobody waits for one."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def expect(self, batch: Sequence[Tracked]) -> None:
        """Makes requests known.

        Raises:
            ValueError: an id that is in use; none is known then.
        """
        with self._news:
            ids = [t.request_id for t in batch]
            used = next((i for i in ids if i in self._live or i in self._kept), None)
            if used is not None:
                raise ValueError(
                    f"request_id={used!r} is in use: its request runs, or nobody has taken its result. Choose another."
                )
            self._live.update(zip(ids, batch))

    def forget(self, batch: Iterable[Tracked]) -> None:
        """Takes back `expect`, for requests that were not submitted after all."""
        with self._news:
            for tracked in batch:
                self._live.pop(tracked.request_id, None)
                self._channels.pop(tracked.request_id, None)

    def find(self, request_id: str) -> Tracked | None:
        """The request of an id, while it is not over."""
        with self._news:
            return self._live.get(request_id)

    def knows(self, request_id: str) -> bool:
        """Whether an output of the id is here or may come."""
        with self._news:
            return request_id in self._live or request_id in self._kept

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Brings outputs, in the order in which they came about."""
        with self._news:
            sent: dict[Channel, list[Delivery]] = {}
            for item in deliveries:
                if item.last:
                    self._live.pop(item.request_id, None)
                channel = self._channels.get(item.request_id)
                if channel is None:
                    self._keep(item)
                else:
                    sent.setdefault(channel, []).append(item)
                    if item.last:
                        del self._channels[item.request_id]
            for channel, items in sent.items():
                self._put(channel, items)

    def give_back(self, request_id: str, deliveries: Sequence[Delivery]) -> None:
        """Keeps a request's outputs, and those to come, for whoever asks, as its channel has nobody at its end."""
        with self._news:
            self._channels.pop(request_id, None)
            items = [*deliveries, *self._kept.pop(request_id, ())]
            items.sort(key=lambda item: math.inf if item.count is None else item.count)  # some may have been overtaken
            for item in items:
                self._keep(item)

    def send(self, request_id: str, channel: Channel) -> None:
        """From now on the outputs of an id go to a channel, first those that are here already."""
        with self._news:
            kept = list(self._kept.pop(request_id, ()))
            if not kept or not kept[-1].last:
                self._channels[request_id] = channel
            if kept:
                self._put(channel, kept)

    def take(self, request_id: str | None = None, timeout: float | None = None) -> Delivery | None:
        """The oldest output, of a request or of all; None after the time, or where none can come any more."""
        with self._news:
            self._news.wait_for(lambda: self._has(request_id) or not self._may_come(request_id), timeout)
            if not self._has(request_id):
                return None
            name = next(iter(self._kept)) if request_id is None else request_id
            items = self._kept.pop(name)
            item = items.popleft()
            if items:
                self._kept[name] = items  # behind the others, whose turn it is
            return item

    def _has(self, request_id: str | None) -> bool:
        return bool(self._kept) if request_id is None else request_id in self._kept

    def _may_come(self, request_id: str | None) -> bool:
        return not self._closed and (request_id is None or request_id in self._live)

    def _put(self, channel: Channel, items: list[Delivery]) -> None:
        # Within the lock, or a later output could overtake these.
        if not channel.put(items):
            for item in items:
                self.give_back(item.request_id, [item])

    def _keep(self, item: Delivery) -> None:
        self._kept.setdefault(item.request_id, deque()).append(item)
        self._news.notify_all()
