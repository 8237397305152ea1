"""The single entry for piecewise execution: breakable capture, or compiled pieces."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from graphs.compiled import CompiledPieces
from graphs.context import context_in
from graphs.errors import CaptureError
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import GraphPool
from graphs.wrapper import BreakableCUDAGraphWrapper

R = TypeVar("R")


class PiecewiseRunner:
    """Holds the model of the family `name` in its captured form, from the call of a `use_` on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._runner: BreakableCUDAGraphWrapper | CompiledPieces | None = None

    def use_breakable(self, model: Callable[..., object], pool: GraphPool) -> None:
        """Capture `model` in segments around its eager breaks."""
        if not self._is_built_for(model):
            # the manager logs
            self._runner = BreakableCUDAGraphWrapper(model, pool, debug_log_enable=False)

    def use_compiled(
        self, model: Callable[..., object], pool: GraphPool, split_ops: Sequence[str]
    ) -> None:
        """Capture `model` in the pieces that torch.compile makes of it."""
        pieces = CompiledPieces(model, pool, split_ops)
        if not self._is_built_for(model):
            self._runner = pieces
        built = self._runner
        if isinstance(built, CompiledPieces) and built.split_ops != pieces.split_ops:
            raise ValueError(
                f"{self.name}: split at {sorted(built.split_ops)}, not at {sorted(split_ops)}"
            )

    def run(self, model: Callable[..., R], model_inputs: Mapping[str, object]) -> R:
        """One forward, as the forward context says: eager, captured now, or replayed."""
        if self._runner is None and context_in(CUDAGraphMode.PIECEWISE) is not None:
            raise CaptureError(
                f"{self.name}: run_pw_graph in mode PIECEWISE without a runner: call "
                "init_breakable_cg_runner or init_compiled_runner before capture, in a mode with "
                "piecewise graphs"
            )
        if self._runner is None or context_in(CUDAGraphMode.FULL) is not None:
            return model(**model_inputs)
        built_for = self._runner.unwrap()
        if built_for != model:
            raise CaptureError(f"run_pw_graph was built for {built_for!r}, not for {model!r}")
        return cast(R, self._runner(**model_inputs))

    def _is_built_for(self, model: Callable[..., object]) -> bool:
        """Whether the runner exists; its graphs, if it has any, are those of one model."""
        if self._runner is None:
            return False
        built_for = self._runner.unwrap()
        if built_for != model:
            raise ValueError(
                f"{self.name}: its runner was built for {built_for!r}: "
                f"give {model!r} a manager of its own"
            )
        return True

    def will_replay(self) -> bool:
        """Whether a forward in the present context would replay."""
        context = context_in(CUDAGraphMode.PIECEWISE)
        if context is None or context.batch_descriptor is None:
            return False
        return self.has_captured(context.batch_descriptor)

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
