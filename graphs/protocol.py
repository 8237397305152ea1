"""What captures and replays: the protocol that CudaBackend and TapeBackend follow.

A backend makes pools; a pool opens a session for each captured forward; it begins and ends graphs.
The graphs of a pool share memory: a result of one lives until another replays.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Protocol

from graphs.weak import V


class CaptureError(RuntimeError):
    """A capture that cannot be, or a replay of what was not captured.

    It names the op, the argument or the descriptor that is wrong, and what would be right.
    """


class Graph(Protocol):
    def replay(self) -> None:
        """Do the work again, on the same addresses."""

    def reset(self) -> None:
        """Drop the work and its hold on the pool."""


class GraphSession(Protocol):
    def begin(self) -> None:
        """Work from here on is captured, not done."""

    def end(self) -> Graph | None:
        """The work since `begin`; None if there was none."""


class GraphHooks:
    """What another stream needs, such as one that copies offloaded weights; these do nothing."""

    def synchronize(self) -> None:
        """Before each capture and each replay: wait for the other stream's earlier work."""

    def join(self) -> None:
        """Before the last graph of a capture ends: wait for the work that the capture forked."""


class GraphPool(Protocol):
    """Memory that the graphs of one manager share."""

    is_capturing_enabled: bool  # see capturing.py; true at first
    hooks: GraphHooks  # called around the captures and replays of its graphs

    def session(
        self, owner: Hashable, *, collect: bool = True, is_last: bool = True
    ) -> AbstractContextManager[GraphSession]:
        """Open the capture of one forward, or of a piece of it; an error drops the current graph.

        owner:   captures of one owner may read each other's results
        collect: first free what can be freed
        is_last: no later piece of this owner is captured from the results of this one
        """

    def weaken(self, value: V) -> V:
        """`value` with weak views in place of its tensors; it pins no memory of the pool."""

    def num_bytes(self) -> int:
        """Bytes that the graphs of this pool hold, whatever else uses the device."""

    def close(self) -> None:
        """Release the memory, once every graph was reset; the pool can be used again."""


class GraphBackend(Protocol):
    """How this machine captures."""

    name: str

    def new_pool(self) -> GraphPool:
        """A pool without graphs."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Run the body on the stream of captures, ordered after and before the work around it."""

    def free_memory(self) -> int:
        """Bytes that the device can still give."""

    def release(self, collect: bool = True) -> None:
        """Give back the memory that nothing holds; `collect` looks for garbage first."""
