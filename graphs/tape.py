"""A backend without a GPU: records the ops of a call and replays them into the same memory.

TapeBackend keeps what matters of CUDA graphs: numbers and branches are frozen, addresses are fixed, a capture does
nothing, results are garbage until the first replay and after the replay of another capture, and reads from the host
are errors. It does not model streams, the reuse of memory inside a pool, or kernels that torch does not dispatch.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.errors import CaptureError
from graphs.host_reads import ForbidHostReads, check_op
from graphs.protocol import GraphPool, GraphSession
from graphs.tape_memory import OwnerMemory
from graphs.weak import map_tensors, tensors_in, weak_view, weak_views

# a string: torch before 2.13 has no type parameters here
Op: TypeAlias = "OpOverload[..., Any]"


class TapeBackend:
    """Captures on the tape; `capacity` is the memory that it pretends to have."""

    name = "tape"

    def __init__(self, capacity: int = 1 << 34) -> None:
        self._capacity = capacity
        self._pools: list[TapePool] = []

    def new_pool(self) -> GraphPool:
        """A pool without graphs."""
        self._pools.append(TapePool())
        return self._pools[-1]

    def side_stream(self) -> AbstractContextManager[None]:
        """Nothing: a CPU has one stream."""
        return nullcontext()

    def free_memory(self) -> int:
        """The capacity less what the pools hold."""
        return self._capacity - sum(pool.num_bytes() for pool in self._pools)

    def release(self, collect: bool = True) -> None:
        """Collect garbage."""
        if collect:
            gc.collect()


class TapePool:
    """Owners that spoil each other's results."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, OwnerMemory] = {}
        self._last: OwnerMemory | None = None

    @contextmanager
    def session(self, owner: Hashable, *, collect: bool = True, is_last: bool = True) -> Iterator[GraphSession]:
        """Record one forward, or one piece of it; see GraphPool.session."""
        if collect:
            gc.collect()
        memory = self._owners.setdefault(owner, OwnerMemory())
        session = TapeSession(self, memory)
        try:
            yield session
        except BaseException:
            session.abort()
            memory.settle()
            raise
        if is_last:
            memory.settle()

    def weaken(self, value: object) -> object:
        """Weak views of the tensors that lie in results; the pool keeps only those alive."""
        return map_tensors(lambda tensor: weak_view(tensor) if self._owns(tensor) else tensor, value)

    def close(self) -> None:
        """Forget every owner; weak views of their results are dangling from here on."""
        self._owners.clear()
        self._last = None

    def take_over(self, memory: OwnerMemory) -> None:
        """`memory` is about to be replayed into: the results of the owner before it are gone."""
        if self._last is not None and self._last is not memory:
            self._last.spoil()
        self._last = memory

    def drop(self, memory: OwnerMemory) -> None:
        """A graph of this owner was reset; with the last one the results go."""
        memory.num_graphs -= 1
        if memory.num_graphs == 0:
            self._owners = {key: kept for key, kept in self._owners.items() if kept is not memory}
            self._last = None if self._last is memory else self._last

    def num_bytes(self) -> int:
        """Bytes that graphs of this pool hold."""
        return sum(memory.num_bytes() for memory in self._owners.values())

    def pinned_bytes(self) -> int:
        """Bytes that could not be shared on CUDA, because a strong reference outside keeps them."""
        return sum(memory.pinned_bytes() for memory in self._owners.values())

    def _owns(self, tensor: Tensor) -> bool:
        return any(memory.owns(tensor) for memory in self._owners.values())


class TapeSession:
    """Begins and ends the recording of graphs."""

    def __init__(self, pool: TapePool, memory: OwnerMemory) -> None:
        self._pool, self._memory = pool, memory
        self._stack = ExitStack()
        self._recorder: _Recorder | None = None

    def begin(self) -> None:
        """Record from here on."""
        assert self._recorder is None, "the last graph has not ended"
        self._recorder = _Recorder(self._memory)
        self._stack.enter_context(ForbidHostReads())
        self._stack.enter_context(self._recorder)

    def end(self) -> "TapeGraph | None":
        """The ops since `begin`; None if there were none."""
        recorder = self._recorder
        assert recorder is not None, "no graph has begun"
        if recorder.inside is not None:
            raise CaptureError(f"an eager break inside the captured op {recorder.inside}: the break must be outermost")
        self.abort()
        if not recorder.calls:
            return None
        self._memory.num_graphs += 1
        return TapeGraph(self._pool, self._memory, recorder)

    def abort(self) -> None:
        """Stop recording, drop what was recorded."""
        self._recorder = None
        self._stack.close()


class TapeGraph:
    """Recorded calls, in order, with the tensors that they were made on."""

    def __init__(self, pool: TapePool, memory: OwnerMemory, recorder: "_Recorder") -> None:
        self._pool, self._memory = pool, memory
        self._calls, self._inputs = recorder.calls, list(recorder.inputs.values())

    def replay(self) -> None:
        """Make the calls again."""
        for name, storage in self._inputs:
            if storage.expired():  # type: ignore[no-untyped-call]
                raise CaptureError(
                    f"an input of {name} was freed after the capture: captured inputs are static buffers"
                )
        self._pool.take_over(self._memory)
        with torch.inference_mode():
            for call in self._calls:
                call()

    def reset(self) -> None:
        """Drop the calls."""
        if self._calls:
            self._calls = []
            self._inputs = []
            self._pool.drop(self._memory)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, memory: OwnerMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.calls: list[Callable[[], object]] = []
        self.inputs: dict[int, tuple[str, StorageWeakRef]] = {}
        self.inside: Op | None = None

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_op(func, args)
        if _is_made_of_ops(func):
            return self._record_inside(func, args, kwargs)
        self._note_inputs(func, args, kwargs)
        for tensor in _written(func, args, kwargs):
            self.memory.save(tensor)
        result = func(*args, **kwargs)
        self._record(func, args, kwargs, result)
        return result

    def _record_inside(self, func: Op, args: Any, kwargs: Any) -> Any:
        """Record the ops that `func` is made of: the Python inside it runs now and never again."""
        outer, self.inside = self.inside, func
        try:
            with self:
                if func.namespace in _TORCHS_OWN:
                    return func.decompose(*args, **kwargs)
                return func.redispatch(torch._C.DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        finally:
            self.inside = outer

    def _note_inputs(self, func: Op, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in([args, kwargs]):
            storage = tensor.untyped_storage()
            if func is torch.ops.aten.lift_fresh.default:
                self.memory.add_constant(tensor)
            elif storage._cdata not in self.inputs and not self.memory.owns(tensor):
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.inputs[storage._cdata] = (str(func), weak)

    def _record(self, func: Op, args: Any, kwargs: Any, result: Any) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs])}
        made = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in given]
        for tensor in made:
            self.memory.add_result(tensor)
        if func.overloadpacket in _UNINITIALISED or not (made or func._schema.is_mutable):
            return
        call = partial(func._op, *_weak(args), **_weak(kwargs))
        if not made:
            self.calls.append(call)
            return
        out_op = _out_variant(func) if len(made) == len(func._schema.returns) else None
        if out_op is None:
            self.calls.append(partial(_run_and_copy, call, [(i, weak_view(t)) for i, t in _places(result, made)]))
        else:
            outs = {name: weak_view(tensor) for name, tensor in zip(_out_names(out_op), made, strict=True)}
            self.calls.append(partial(out_op._op, *_weak(args), **_weak(kwargs), **outs))


_TORCHS_OWN = ("aten", "prims")
_UNINITIALISED = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


@cache
def _is_made_of_ops(func: Op) -> bool:
    """Whether to look inside: composite ops, and everything that is not torch's own."""
    name = func.name()  # type: ignore[no-untyped-call]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, DispatchKey.CompositeImplicitAutograd)
    return bool(composite) or func.namespace not in _TORCHS_OWN


def _written(func: Op, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that the schema says are written in place."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


@cache
def _out_variant(func: Op) -> "Op | None":
    """The overload of `func` that takes the same arguments and writes into given tensors."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        op = getattr(func.overloadpacket, name)
        given = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
        if given == wanted and len(_out_names(op)) == len(func._schema.returns):
            return op if all(str(a.type) == "Tensor" for a in op._schema.arguments if a.is_out) else None
    return None


def _out_names(op: Op) -> list[str]:
    return [a.name for a in op._schema.arguments if a.is_out]


def _places(result: Any, made: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Where in the flat result the made tensors are."""
    for i, tensor in enumerate(tensors_in(result)):
        if any(tensor is other for other in made):
            yield i, tensor


def _run_and_copy(call: Callable[[], object], outs: list[tuple[int, Tensor]]) -> None:
    results = list(tensors_in(call()))
    for i, out in outs:
        out.copy_(results[i])


def _weak(value: Any) -> Any:
    return weak_views(value)
