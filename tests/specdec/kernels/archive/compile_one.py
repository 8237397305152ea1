"""A program that compiles one kernel without a GPU, and prints whether it was in the cache."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def _add_kernel(x_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < N) + 1, mask=i < N)


if __name__ == "__main__":
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    types = {"x_ptr": "*fp32", "N": "i32", "BLOCK": "constexpr"}
    source = ASTSource(_add_kernel, types, {(2,): 64})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert kernel.metadata.name == "_add_kernel"
    assert kernel.kernel.startswith(b"\x7fELF")
    print(*hits)
