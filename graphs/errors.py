"""The error of graphs/: a capture that cannot be, or a replay of what was not captured."""


class CaptureError(RuntimeError):
    """Names the op, the argument or the descriptor that is wrong, and what would be right."""
