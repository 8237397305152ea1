"""When a capture may begin: one at a time in a thread, and none after `set_cudagraph_capturing_enabled(False)`.

The switch is for the whole process and is turned off when serving begins, so that no graph is captured lazily between
two requests. With the forward context and the active breakable capture this is the only ambient state of the project.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphs.errors import CaptureError


class _Thread(threading.local):
    capturing: str | None = None


class _Switch:
    enabled = True


_thread = _Thread()
_switch = _Switch()


@contextmanager
def exclusive_capture(what: str) -> Iterator[None]:
    """Hold this thread's one place for a capture; `what` names the holder in the errors of the others."""
    validate_cudagraph_capturing_enabled(what)
    if _thread.capturing is not None:
        raise CaptureError(f"captures do not nest: {what} began inside {_thread.capturing}")
    _thread.capturing = what
    try:
        yield
    finally:
        _thread.capturing = None


def is_capturing() -> bool:
    """Whether a capture, full or breakable, is active in this thread."""
    return _thread.capturing is not None


def set_cudagraph_capturing_enabled(enabled: bool) -> None:
    """Allow or forbid every later capture of this process."""
    _switch.enabled = enabled


def validate_cudagraph_capturing_enabled(what: str) -> None:
    """CaptureError when captures are forbidden."""
    if not _switch.enabled:
        raise CaptureError(f"{what} would be captured now, but capture ended when serving began: capture it at start")
