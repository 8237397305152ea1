"""The logger of this package; an application sets its level."""

import logging

from graphs.modes import BatchDescriptor, CUDAGraphMode

logger = logging.getLogger("graphs")


def log_capture(
    what: str, mode: CUDAGraphMode, desc: BatchDescriptor, num_graphs: int, num_bytes: int
) -> None:
    """The debug line of one capture."""
    logger.debug(
        "captured %s, %s, %s: %d segments, %d bytes", what, mode.name, desc, num_graphs, num_bytes
    )
