"""When a capture may begin: one at a time in a thread, and none into a pool that was shut.

`set_cudagraph_capturing_enabled` shuts a pool when serving begins, so that none of its graphs is
captured lazily between two requests; the pools of other managers, engines and threads stay open.
The thread's capture is, with the forward context, the only ambient state of the project.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphs.protocol import CaptureError, GraphPool


class _Thread(threading.local):
    capturing: str | None = None


_thread = _Thread()


@contextmanager
def exclusive_capture(what: str, pool: GraphPool) -> Iterator[None]:
    """The only capture of this thread, during the body; `what` names it in errors."""
    validate_cudagraph_capturing_enabled(what, pool)
    if _thread.capturing is not None:
        raise CaptureError(f"captures do not nest: {what} began inside {_thread.capturing}")
    _thread.capturing = what
    try:
        yield
    finally:
        _thread.capturing = None


def set_cudagraph_capturing_enabled(pool: GraphPool, enabled: bool) -> None:
    pool.is_capturing_enabled = enabled


def validate_cudagraph_capturing_enabled(what: str, pool: GraphPool) -> None:
    """CaptureError when captures into this pool are forbidden."""
    if not pool.is_capturing_enabled:
        reason = "capture ended when serving began: capture it at start"
        raise CaptureError(f"{what} would be captured now, but {reason}")
