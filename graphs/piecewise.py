"""The single entry for piecewise execution, over two implementations: breakable capture and compiled pieces."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from graphs.compiled import CompiledPieces
from graphs.context import get_forward_context, has_forward_context
from graphs.errors import CaptureError
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import GraphPool
from graphs.wrapper import BreakableCUDAGraphWrapper

R = TypeVar("R")


class PiecewiseRunner:
    """Holds the one model of the family `name` in its captured form; without one it runs no forward in pieces."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._runner: BreakableCUDAGraphWrapper | CompiledPieces | None = None

    def use_breakable(self, model: Callable[..., object], pool: GraphPool) -> None:
        """Capture `model` in segments around its eager breaks."""
        if not self._is_built_for(model):
            self._runner = BreakableCUDAGraphWrapper(
                model, pool, debug_log_enable=False
            )  # the manager logs

    def use_compiled(
        self, model: Callable[..., object], pool: GraphPool, split_ops: Sequence[str]
    ) -> None:
        """Capture `model` in the pieces that torch.compile makes of it."""
        pieces = CompiledPieces(model, pool, split_ops)
        if not self._is_built_for(model):
            self._runner = pieces
        elif (
            isinstance(self._runner, CompiledPieces) and self._runner.split_ops != pieces.split_ops
        ):
            raise ValueError(
                f"{self.name}: split at {sorted(self._runner.split_ops)}, not at {sorted(split_ops)}"
            )

    def run(self, model: Callable[..., R], model_inputs: Mapping[str, object]) -> R:
        """One forward, as the forward context says: eager, captured now, or replayed."""
        context = get_forward_context() if has_forward_context() else None
        mode = CUDAGraphMode.NONE if context is None else context.runtime_mode
        if mode is CUDAGraphMode.PIECEWISE and self._runner is None:
            raise CaptureError(
                f"{self.name}: run_pw_graph in mode PIECEWISE without a runner: call init_breakable_cg_runner "
                "or init_compiled_runner before capture, in a mode with piecewise graphs"
            )
        if self._runner is None or mode is CUDAGraphMode.FULL:
            return model(**model_inputs)
        if self._runner.unwrap() != model:
            raise CaptureError(
                f"run_pw_graph was built for {self._runner.unwrap()!r}, not for {model!r}"
            )
        return cast(R, self._runner(**model_inputs))

    def _is_built_for(self, model: Callable[..., object]) -> bool:
        """Whether the runner is there already; it may hold graphs, which another model would drop."""
        if self._runner is not None and self._runner.unwrap() != model:
            raise ValueError(
                f"{self.name}: its runner was built for {self._runner.unwrap()!r}: give {model!r} a manager of its own"
            )
        return self._runner is not None

    def will_replay(self) -> bool:
        """Whether a forward in the present context would replay."""
        if not has_forward_context():
            return False
        context = get_forward_context()
        descriptor = context.batch_descriptor
        return (
            context.runtime_mode is CUDAGraphMode.PIECEWISE
            and descriptor is not None
            and self.has_captured(descriptor)
        )

    def num_graphs(self, descriptor: BatchDescriptor) -> int:
        """Graphs captured for a descriptor."""
        return 0 if self._runner is None else self._runner.num_graphs(descriptor)

    def has_captured(self, descriptor: BatchDescriptor) -> bool:
        """Whether a forward with this descriptor would replay."""
        return self._runner is not None and self._runner.has_captured(descriptor)

    def clear_graphs(self) -> None:
        """Drop every graph."""
        if self._runner is not None:
            self._runner.clear_graphs()
