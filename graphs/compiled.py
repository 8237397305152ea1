"""The other implementation of piecewise execution: torch.compile splits the model's graph at given ops.

The ops between the splits become CUDAGraphWrappers; the split ops run eagerly and read the forward context live.
There is no Inductor behind it, only the split: the kernels are those of eager mode. What it costs beside breakable
capture is the trace, the guards that every call evaluates, and that the model must be traceable.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as symbolic_shapes
from torch.fx.passes.split_module import split_module

from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import GraphPool
from graphs.weak import map_tensors, plain_view
from graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper, captured_context, descriptor_of


class CompiledPieces:
    """A model compiled into pieces around its `split_ops`, given by name ("engine::attend")."""

    def __init__(
        self, model: Callable[..., object], pool: GraphPool, split_ops: Sequence[str]
    ) -> None:
        self._model, self._pool = model, pool
        self.split_ops = {name.replace("::", ".") for name in split_ops}
        self.pieces: list[CUDAGraphWrapper] = []
        self._compiled: Callable[..., object] = torch.compile(
            model, backend=self._split, fullgraph=True, dynamic=True
        )

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The first call of a kind compiles: let it be a warm-up, with mode NONE in the forward context."""
        # slices would bring guards about their buffers, and with them a second version of the code for some sizes
        inputs = [map_tensors(plain_view, value) for value in args]
        named = {name: map_tensors(plain_view, value) for name, value in kwargs.items()}
        context = captured_context(CUDAGraphMode.PIECEWISE)
        is_replay = context is not None and self.has_captured(descriptor_of(context))
        with nullcontext() if is_replay else _one_trace_for_all_sizes():
            return self._compiled(*inputs, **named)

    def unwrap(self) -> Callable[..., object]:
        """The model itself."""
        return self._model

    def has_captured(self, descriptor: BatchDescriptor) -> bool:
        """Whether a call with this descriptor would replay."""
        return any(descriptor in piece.entries for piece in self.pieces)

    def num_graphs(self, descriptor: BatchDescriptor) -> int:
        """Graphs captured for a descriptor; a piece without work has none."""
        entries = [piece.entries.get(descriptor) for piece in self.pieces]
        return sum(entry is not None and entry.graph is not None for entry in entries)

    def clear_graphs(self) -> None:
        """Drop the graphs of every piece; the code stays compiled."""
        for piece in self.pieces:
            piece.clear_graphs()

    def _split(self, module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        """Called by torch.compile with the whole graph."""
        pieces = split_at(module, self._is_split_op)
        names = [name for name, part in pieces.named_children() if not self._has_split_op(part)]
        for name in names:
            # the manager logs the pieces of a capture together
            options = CUDAGraphOptions(
                debug_log_enable=False,
                gc_disable=name != names[0],
                weak_ref_output=name == names[-1],
            )
            wrapper = CUDAGraphWrapper(
                getattr(pieces, name), CUDAGraphMode.PIECEWISE, self._pool, options
            )
            self.pieces.append(wrapper)
            # a child must be a Module, an attribute need not be
            delattr(pieces, name)
            pieces.__dict__[name] = wrapper
        return pieces.forward

    def _is_split_op(self, node: Node) -> bool:
        return (
            node.op == "call_function"
            and str(node.target).removesuffix(".default") in self.split_ops
        )

    def _has_split_op(self, part: torch.nn.Module) -> bool:
        return isinstance(part, GraphModule) and any(
            self._is_split_op(node) for node in part.graph.nodes
        )


@contextmanager
def _one_trace_for_all_sizes() -> Iterator[None]:
    """A trace made in the body is right for every number of rows above one."""
    # a number that became an input of the graph, such as a norm's eps, would be read back inside a piece
    numbers = torch._dynamo.config.patch(specialize_float=True)
    # as many rows as there are channels is no reason to tie the two
    sizes = symbolic_shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with numbers, sizes:
        yield


def split_at(module: GraphModule, is_split_op: Callable[[Node], bool]) -> GraphModule:
    """`module` as a chain of submodules, each split op alone in one."""
    part, parts = 0, {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_split = is_split_op(node)
        part += is_split
        parts[node] = part
        part += is_split
    # in-place ops are not ordered by data: keep the order of the source
    return split_module(module, module, parts.__getitem__, keep_original_order=True)
