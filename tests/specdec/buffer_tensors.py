"""All tensors of the step buffers by name, those of candidates too."""

from torch import Tensor

from specdec.rounds.buffers import StepBuffers


def buffer_tensors(buffers: StepBuffers) -> dict[str, Tensor]:
    found = {f"candidate_{name}": value for name, value in vars(buffers.candidates).items()}
    named = {**vars(buffers), **found}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
