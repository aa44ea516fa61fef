"""A request on its way from the user to the engine and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from cuformers.auto.batching.output import GenerationOutput, RequestStatus
from cuformers.engine.request import Finish, Request

_STATUS = {Finish.CANCELLED: RequestStatus.CANCELLED, Finish.FAILED: RequestStatus.FAILED}
_REASON = {Finish.EOS: "stop", Finish.STOPPED: "stop", Finish.LENGTH: "length"}
_ERROR = {Finish.CANCELLED: "the request was cancelled.", Finish.FAILED: "the engine dropped the request."}


@dataclass(eq=False, kw_only=True)
class Tracked:
    """What is known of a request. The submitting thread makes it; from then on only the engine's thread changes it."""

    request_id: str
    prompt_ids: list[int]
    request: Request | None = None
    """What the engine runs; None where the request could never run."""
    streaming: bool = False
    """Each token is handed out when it comes, and not only the whole at the end."""
    record_timestamps: bool = False
    stops: Sequence[Callable[[Request], bool]] = ()
    """End the request after a token for which one of them holds."""
    status: RequestStatus = RequestStatus.PENDING
    error: str | None = None
    created_time: float = field(default_factory=perf_counter)
    taken_time: float = -1
    """When the engine took it; -1: not yet."""
    ended_time: float = -1
    """When it ended; -1: not yet."""
    timestamps: list[float] = field(default_factory=list)

    def end(self, status: RequestStatus, error: str | None = None) -> None:
        """Marks it as over."""
        assert self.status < RequestStatus.FINISHED, "a request ends once"
        self.status, self.error, self.ended_time = status, error, perf_counter()

    def follow_engine(self, request: Request) -> None:
        """Marks it as over as the engine says it is."""
        assert request.finish is not None
        status = _STATUS.get(request.finish, RequestStatus.FAILED if self.error else RequestStatus.FINISHED)
        self.end(status, self.error or request.error or _ERROR.get(request.finish))

    def output(self, count: int | None = None) -> GenerationOutput:
        """What users see: after so many tokens, or, with None, in the end."""
        over = count is None
        request = self.request
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=list(self.prompt_ids) if over else self.prompt_ids,
            error=self.error if over else None,
            status=self.status if over else RequestStatus.DECODING,
            created_time=self.created_time,
            lifespan=(self.taken_time, self.ended_time if over else -1),
            timestamps=self.timestamps[:count] if self.record_timestamps else None,
            finish_reason=_REASON.get(request.finish) if over and request and request.finish else None,
            **({} if request is None else _said(request, count)),
        )


def _said(request: Request, count: int | None) -> dict[str, Any]:
    """What the engine has said of a request, after so many tokens."""
    return {
        "generated_tokens": request.generated[:count],
        "logprobs": request.token_logprobs[:count],
        "top_logprobs": request.top_logprobs[:count] if request.logprobs else [],
        "prompt_logprobs": request.prompt_token_logprobs,
        "prompt_top_logprobs": request.prompt_top_logprobs if request.prompt_logprobs else [],
    }


class Delivery(NamedTuple):
    """An output that somebody will want: made into one in the thread that takes it."""

    tracked: Tracked
    count: int | None
    """Tokens that it shows; None for the last one, which shows all."""

    @property
    def request_id(self) -> str:
        return self.tracked.request_id

    @property
    def last(self) -> bool:
        return self.count is None

    def output(self) -> GenerationOutput:
        """For the user."""
        return self.tracked.output(self.count)
