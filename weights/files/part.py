"""A part of a tensor along one axis, and where its bytes lie among those of the tensor.

They lie in runs of one length: along the first axis one, for columns of a matrix one in each row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The part goes from `start` to `stop` along `axis`."""

    axis: int
    start: int
    stop: int

    def shape_in(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Give its shape in a tensor of shape `whole`."""
        return (*whole[: self.axis], self.stop - self.start, *whole[self.axis + 1 :])

    def runs_in(self, whole: tuple[int, ...], itemsize: int) -> "Runs":
        """Find its bytes in those of a tensor of shape `whole`, row-major and without gaps."""
        step = math.prod(whole[self.axis + 1 :]) * itemsize
        count = math.prod(whole[: self.axis])
        length = (self.stop - self.start) * step
        return Runs(self.start * step, length, whole[self.axis] * step, count)


@dataclass(frozen=True, slots=True)
class Runs:
    """There are `count` runs of `length` bytes: from byte `first` on, and again every `stride`."""

    first: int
    length: int
    stride: int
    count: int = 1

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all runs."""
        return self.length * self.count

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """List where the part's bytes `start` to `stop` lie: byte of the tensor, and how many."""
        while start < stop:
            run, offset = divmod(start, self.length)
            num_bytes = min(self.length - offset, stop - start)
            yield self.first + run * self.stride + offset, num_bytes
            start += num_bytes

    def hull(self, start: int, stop: int) -> tuple[int, int]:
        """Find the bytes of the tensor from the first run to the last that these bytes lie in."""
        first, last = start // self.length, (stop - 1) // self.length
        return self.first + first * self.stride, self.first + last * self.stride + self.length
