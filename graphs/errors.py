"""The error of graphs/: something was done during a capture that no capture can hold, or too late, or twice."""


class CaptureError(RuntimeError):
    """Names the op, the argument or the descriptor that is wrong, and what would be right."""
