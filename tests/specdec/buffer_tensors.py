"""All tensors of the step buffers by name, those of trees too."""

from torch import Tensor

from specdec.rounds.buffers import StepBuffers


def buffer_tensors(buffers: StepBuffers) -> dict[str, Tensor]:
    of_trees = {} if buffers.tree is None else vars(buffers.tree)
    named = {**vars(buffers), **{f"tree_{name}": value for name, value in of_trees.items()}}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
