"""Parts of a forward as one CUDA graph, some of them in conditional nodes.

Each part was captured as a graph of its own. In the joined graph it is a child, one after another;
a part with a count is the child of an IF node, behind a kernel that sets the node's condition by
the count. torch has no call for any of this, so it is the driver's, by ctypes; the kernel is given
as PTX, in which the driver itself resolves the call that sets a condition. CUDA 12.4 or later.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_longlong, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import cast

import torch

from graphs.errors import CaptureError
from graphs.protocol import Part

CONDITIONAL, IF = 13, 0  # CU_GRAPH_NODE_TYPE_CONDITIONAL, CU_GRAPH_COND_TYPE_IF

SET_CONDITION = """
.version 8.0
.target sm_70
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 of, .param .b32 to);

.visible .entry set_condition (.param .u64 condition, .param .u64 count_ptr)
{
    .reg .pred %is_some;
    .reg .b32 %value;
    .reg .b64 %handle, %address, %count;
    ld.param.u64 %handle, [condition];
    ld.param.u64 %address, [count_ptr];
    cvta.to.global.u64 %address, %address;
    ld.global.s64 %count, [%address];
    setp.ne.s64 %is_some, %count, 0;
    selp.u32 %value, 1, 0, %is_some;
    {
        .param .b64 of_arg;
        .param .b32 to_arg;
        st.param.b64 [of_arg], %handle;
        st.param.b32 [to_arg], %value;
        call.uni cudaGraphSetConditional, (of_arg, to_arg);
    }
    ret;
}
"""


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", ctypes.POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class ConditionalNode(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS; bodies is written by the driver, which owns them."""

    _fields_ = (
        ("handle", c_uint64),
        ("kind", c_int),
        ("size", c_uint),
        ("bodies", ctypes.POINTER(c_void_p)),
        ("context", c_void_p),
    )


class _AnyNode(ctypes.Union):
    _fields_ = (("conditional", ConditionalNode), ("reserved", c_longlong * 29))


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams."""

    _fields_ = (
        ("kind", c_int),
        ("reserved0", c_int * 3),
        ("any", _AnyNode),
        ("reserved2", c_longlong),
    )


class CudaParts:
    """One graph of several, which torch captured; it keeps those, whose memory it uses."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._parts = list(parts)
        self._device = device
        self._graph = c_void_p()
        self._exec = c_void_p()
        with torch.cuda.device(device):
            _call("cuGraphCreate", byref(self._graph), c_uint(0))
            last: c_void_p | None = None
            for part in self._parts:
                last = self._add(part, last)
            instantiate = "cuGraphInstantiateWithFlags"
            _call(instantiate, byref(self._exec), self._graph, ctypes.c_ulonglong(0))

    def replay(self) -> None:
        """On the current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _call("cuGraphLaunch", self._exec, c_void_p(stream))

    def reset(self) -> None:
        """Drop all graphs."""
        if self._exec:
            _call("cuGraphExecDestroy", self._exec)
            _call("cuGraphDestroy", self._graph)
            self._exec = c_void_p()
        for part in self._parts:
            part.graph.reset()
        self._parts.clear()

    def _add(self, part: Part, last: c_void_p | None) -> c_void_p:
        """Returns its node, after which the next one comes."""
        captured = c_void_p(cast("torch.cuda.CUDAGraph", part.graph).raw_cuda_graph())
        if part.count is None:
            return _add_child(self._graph, last, captured)
        handle = c_uint64()
        context = _context()
        off = c_uint(0)
        create = "cuGraphConditionalHandleCreate"
        _call(create, byref(handle), self._graph, context, off, off)
        setter = _add_setter(self._graph, last, handle, part.count.data_ptr())
        params = NodeParams(kind=CONDITIONAL)
        params.any.conditional = ConditionalNode(handle=handle, kind=IF, size=1, context=context)
        node = c_void_p()
        after = (byref(setter), None, c_size_t(1))
        _call("cuGraphAddNode_v2", byref(node), self._graph, *after, byref(params))
        _add_child(c_void_p(params.any.conditional.bodies[0]), None, captured)
        return node


def _add_child(graph: c_void_p, last: c_void_p | None, child: c_void_p) -> c_void_p:
    node = c_void_p()
    _call("cuGraphAddChildGraphNode", byref(node), graph, *_after(last), child)
    return node


def _add_setter(
    graph: c_void_p, last: c_void_p | None, handle: c_uint64, count_ptr: int
) -> c_void_p:
    """One thread, which sets the condition by the count."""
    values = (handle, c_uint64(count_ptr))
    arguments = (c_void_p * 2)(*(ctypes.addressof(value) for value in values))
    one = (c_uint * 3)(1, 1, 1)
    params = KernelNode(function=_setter(_context().value), grid=one, block=one)
    params.arguments = ctypes.cast(arguments, ctypes.POINTER(c_void_p))
    node = c_void_p()
    _call("cuGraphAddKernelNode_v2", byref(node), graph, *_after(last), byref(params))
    return node


def _after(last: c_void_p | None) -> tuple[object, c_size_t]:
    return (None, c_size_t(0)) if last is None else (byref(last), c_size_t(1))


def _context() -> c_void_p:
    """The current device's."""
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    return context


@cache
def _setter(context: int | None) -> int | None:
    """The kernel, loaded once for each context; it stays loaded."""
    module, function = c_void_p(), c_void_p()
    _call("cuModuleLoadData", byref(module), ctypes.c_char_p(SET_CONDITION.encode()))
    _call("cuModuleGetFunction", byref(function), module, ctypes.c_char_p(b"set_condition"))
    return function.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """A call of the driver; an error says which."""
    status = getattr(_driver(), name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, byref(text))
        found = "an unknown error" if text.value is None else text.value.decode()
        raise CaptureError(f"conditional graphs: {name} failed with {found} ({status})")
