"""The recorder of the tape: a dispatch mode that turns the ops it sees into calls on weak views.

Views are kept as addresses. An op that makes tensors is replayed by its `out=` overload, or its
results are copied to where the first ones were. Of an op made of other ops, those are recorded.
Ops of the namespace "transfers" move data between processes: they are called again as they are.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.tape.host_reads import check_op, has_masks
from graphs.tape.memory import OwnerMemory
from graphs.weak import tensors_in, weak_views

# a string: torch before 2.13 has no type parameters here
Op: TypeAlias = "OpOverload[..., object]"
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects `calls`, and as `inputs` the storages they read that the capture did not make."""

    def __init__(self, memory: OwnerMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.calls: list[Callable[[], object]] = []
        self.inputs: dict[int, tuple[str, StorageWeakRef]] = {}
        self.inside: Op | None = None

    def __torch_dispatch__(
        self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        check_op(func, args)
        if _is_made_of_ops(func):
            return self._record_inside(func, args, kwargs)
        self._note_inputs(func, args, kwargs)
        self._save_written(func, args, kwargs)
        result = func(*args, **kwargs)
        self._record(func, args, kwargs, result)
        return result

    def _record_inside(self, func: Op, args: Args, kwargs: Kwargs) -> object:
        """Record the ops that `func` is made of; the Python inside it runs now and never again."""
        outer = self.inside
        self.inside = func
        try:
            with self:
                if func.namespace in _TORCH_NAMESPACES:
                    return func.decompose(*args, **kwargs)
                return func.redispatch(torch._C.DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        finally:
            self.inside = outer

    def _save_written(self, func: Op, args: Args, kwargs: Kwargs) -> None:
        if func is torch.ops.aten.index_put_.default and not has_masks(args):
            cache, indices = args[:2]
            assert isinstance(cache, Tensor)
            assert isinstance(indices, list | tuple)
            self.memory.save_rows(cache, indices)
        else:
            for tensor in _written(func, args, kwargs):
                self.memory.save(tensor)

    def _note_inputs(self, func: Op, args: Args, kwargs: Kwargs) -> None:
        for tensor in tensors_in([args, kwargs]):
            storage = tensor.untyped_storage()
            if func is torch.ops.aten.lift_fresh.default:
                self.memory.constants.append(storage)
            elif storage._cdata not in self.inputs and not self.memory.owns(tensor):
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.inputs[storage._cdata] = (str(func), weak)

    def _record(self, func: Op, args: Args, kwargs: Kwargs, result: object) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs])}
        made = {
            i: tensor
            for i, tensor in enumerate(tensors_in(result))
            if tensor.untyped_storage()._cdata not in given
        }
        for tensor in made.values():
            self.memory.add_result(tensor)
        if func.overloadpacket.__name__ in _UNINITIALISED or not (made or func._schema.is_mutable):
            return
        weak_args, weak_kwargs = weak_views((args, kwargs))
        call: Callable[[], object] = partial(func._op, *weak_args, **weak_kwargs)
        out_op = _out_variant(func) if len(made) == len(func._schema.returns) else None
        if made and out_op is not None:
            names = [argument.name for argument in out_op._schema.arguments if argument.is_out]
            outs = zip(names, weak_views([*made.values()]), strict=True)
            call = partial(out_op._op, *weak_args, **weak_kwargs, **dict(outs))
        elif made:
            call = partial(_run_and_copy, call, weak_views(made))
        self.calls.append(call)


_TORCH_NAMESPACES = ("aten", "prims")
_WHOLE_NAMESPACES = (*_TORCH_NAMESPACES, "transfers")  # ops that move data between processes
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@cache
def _is_made_of_ops(func: Op) -> bool:
    """Whether to look inside: composite ops, and everything that is not of these namespaces."""
    name = func.name()  # type: ignore[no-untyped-call]
    key = DispatchKey.CompositeImplicitAutograd
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    return bool(composite) or func.namespace not in _WHOLE_NAMESPACES


def _written(func: Op, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """The tensors that the schema says are written in place."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))


@cache
def _out_variant(func: Op) -> "Op | None":
    """The overload of `func` that takes the same arguments and writes into given tensors."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        op = getattr(func.overloadpacket, name)
        given = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
        outs = [a for a in op._schema.arguments if a.is_out]
        if given == wanted and len(outs) == len(func._schema.returns):
            return op if all(str(a.type) == "Tensor" for a in outs) else None
    return None


def _run_and_copy(call: Callable[[], object], outs: dict[int, Tensor]) -> None:
    results = list(tensors_in(call()))
    for i, out in outs.items():
        out.copy_(results[i])
