"""A kernel on any device, in Triton's interpreter on a CPU, where its function takes the twin."""

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from unittest.mock import patch

P = ParamSpec("P")
R = TypeVar("R")


def by_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """The function without its twin."""
    body = inspect.unwrap(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with patch(f"{body.__module__}.use_triton", lambda _: True):
            return body(*args, **kwargs)

    return call
