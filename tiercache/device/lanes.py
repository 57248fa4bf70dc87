"""Copies beside the computation: on a stream of their own where there is CUDA, at once where not.

A lane begins when what was computed before is done, copies, and ends with a fence. Before anything that
was copied to is read, or anything that was copied from is written again, the fence has to be passed:
`done()` for the scheduler, `before()` for the kernels that come next on the current stream. That is the
whole contract; it is the same on every device.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and a source of equal shape and dtype."""


class Fence(Protocol):
    """The end of one batch of copies."""

    def done(self) -> bool:
        """Whether they are done. Never blocks."""
        ...

    def wait(self) -> None:
        """Return when they are done."""
        ...

    def before(self) -> None:
        """Make what is queued next on the current stream wait for them; the caller does not wait."""
        ...


class Lane(Protocol):
    """Where copies run."""

    def run(self, copies: Sequence[Copy]) -> Fence:
        """Copy each source into its target, after all work queued so far on the current stream.

        The caller keeps both alive and unchanged until the fence is passed.
        """
        ...


class _Passed:
    """The fence of copies that were done at once."""

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> None:
        """Return."""

    def before(self) -> None:
        """Nothing has to wait."""


def passed() -> Fence:
    """Return the fence of copies that are done, or that there were none of."""
    return _Passed()


class HostLane:
    """Copies at once, in the calling thread."""

    def run(self, copies: Sequence[Copy]) -> Fence:
        """Copy."""
        for target, source in copies:
            target.copy_(source)
        return passed()


class _Event:
    """The fence of copies on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        """Whether the event has happened."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the event has happened."""
        self._event.synchronize()

    def before(self) -> None:
        """Make the current stream of the device wait for the event."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLane:
    """Copies on a stream of its own. Host memory that is not pinned makes a copy block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, copies: Sequence[Copy]) -> Fence:
        """Queue the copies behind what the current stream has queued."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        return _Event(event, self._device)


def lane_for(device: torch.device) -> Lane:
    """Return the lane for pools on `device`."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
