"""The other implementation of piecewise execution: torch.compile splits the model at given ops.

The ops between the splits become CUDAGraphWrappers; the split ops run eagerly and read the forward
context live. Inductor is not used, so the kernels are those of eager mode. Compared with breakable
capture it costs the trace and the guards that each call evaluates, and the model must be traceable.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as symbolic_shapes
from torch.fx.passes.split_module import split_module

from graphs.context import context_in
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import GraphPool
from graphs.weak import map_tensors, plain_view
from graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper


class CompiledPieces:
    """A model compiled into pieces around its `split_ops`, given by name ("engine::attend")."""

    def __init__(
        self, model: Callable[..., object], pool: GraphPool, split_ops: Sequence[str]
    ) -> None:
        self._model = model
        self._pool = pool
        self.split_ops = {name.replace("::", ".") for name in split_ops}
        self.pieces: list[CUDAGraphWrapper] = []
        compiled = torch.compile(model, backend=self._split, fullgraph=True, dynamic=True)
        self._compiled: Callable[..., object] = compiled

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The first call compiles: let it be a warm-up, with mode NONE in the forward context."""
        # slices would bring guards on their buffers, and so a second compilation for some sizes
        inputs, named = map_tensors(plain_view, (args, kwargs))
        context = context_in(CUDAGraphMode.PIECEWISE)
        is_replay = context is not None and self.has_captured(context.graph_key())
        with nullcontext() if is_replay else _one_trace_for_all_sizes():
            return self._compiled(*inputs, **named)

    def unwrap(self) -> Callable[..., object]:
        return self._model

    def has_captured(self, descriptor: BatchDescriptor) -> bool:
        return any(piece.has_captured(descriptor) for piece in self.pieces)

    def num_graphs(self, descriptor: BatchDescriptor) -> int:
        """Graphs captured for a descriptor; a piece without work has none."""
        return sum(p.num_graphs(descriptor) for p in self.pieces if p.has_captured(descriptor))

    def clear_graphs(self) -> None:
        """Drop the graphs of every piece; the code stays compiled."""
        for piece in self.pieces:
            piece.clear_graphs()

    def _split(self, module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        """Called by torch.compile with the whole graph."""
        pieces = split_at(module, self._is_split_op)
        names = [name for name, part in pieces.named_children() if not self._has_split_op(part)]
        for name in names:
            options = CUDAGraphOptions(
                debug_log_enable=False,  # the manager logs the pieces of a capture together
                gc_disable=name != names[0],
                weak_ref_output=name == names[-1],
            )
            part = getattr(pieces, name)
            wrapper = CUDAGraphWrapper(part, CUDAGraphMode.PIECEWISE, self._pool, options)
            self.pieces.append(wrapper)
            # a child must be a Module, an attribute need not be
            delattr(pieces, name)
            pieces.__dict__[name] = wrapper
        return pieces.forward

    def _is_split_op(self, node: Node) -> bool:
        name = str(node.target).removesuffix(".default")
        return node.op == "call_function" and name in self.split_ops

    def _has_split_op(self, part: torch.nn.Module) -> bool:
        return isinstance(part, GraphModule) and any(map(self._is_split_op, part.graph.nodes))


@contextmanager
def _one_trace_for_all_sizes() -> Iterator[None]:
    """A trace made in the body is right for every number of rows above one."""
    # a number that became an input of the graph (a norm's eps) would be read back inside a piece
    # engines share the code of a model's forward, and so its number of traces
    numbers = torch._dynamo.config.patch(specialize_float=True, recompile_limit=64)
    # as many rows as channels does not mean that the two sizes are one
    sizes = symbolic_shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with numbers, sizes:
        yield


def split_at(module: GraphModule, is_split_op: Callable[[Node], bool]) -> GraphModule:
    """`module` as a chain of submodules, each split op alone in one."""
    part = 0
    parts = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_split = is_split_op(node)
        part += is_split
        parts[node] = part
        part += is_split
    # in-place ops are not ordered by data: keep the order of the source
    return split_module(module, module, parts.__getitem__, keep_original_order=True)
