"""The single entry for piecewise execution: breakable capture, or compiled pieces."""

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar, cast

from graphs.compiled import CompiledPieces
from graphs.context import context_in
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import CaptureError
from graphs.wrapper import BreakableCUDAGraphWrapper

R = TypeVar("R")
Runner: TypeAlias = BreakableCUDAGraphWrapper | CompiledPieces


class PiecewiseRunner:
    """Holds the model of the family `name` in its captured form, from the call of `use` on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._runner: Runner | None = None

    def use(self, runner: Runner) -> None:
        """Run a model in this form; nothing changes where the same model has one already."""
        built = self._runner
        if built is None:
            self._runner = runner
        elif built.unwrap() != runner.unwrap():
            raise ValueError(
                f"{self.name}: its runner was built for {built.unwrap()!r}: "
                f"give {runner.unwrap()!r} a manager of its own"
            )
        elif isinstance(built, CompiledPieces) and isinstance(runner, CompiledPieces):
            before, now = sorted(built.split_ops), sorted(runner.split_ops)
            if before != now:
                raise ValueError(f"{self.name}: split at {before}, not at {now}")

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

    def will_replay(self) -> bool:
        """Whether a forward in the present context would replay."""
        context = context_in(CUDAGraphMode.PIECEWISE)
        descriptor = None if context is None else context.batch_descriptor
        return descriptor is not None and self.has_captured(descriptor)

    def num_graphs(self, descriptor: BatchDescriptor) -> int:
        return 0 if self._runner is None else self._runner.num_graphs(descriptor)

    def has_captured(self, descriptor: BatchDescriptor) -> bool:
        return self._runner is not None and self._runner.has_captured(descriptor)

    def clear_graphs(self) -> None:
        if self._runner is not None:
            self._runner.clear_graphs()
