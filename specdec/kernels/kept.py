"""Stores of results that later kernels read: they stay in the L2 cache until then, and no longer.

The weights of a pass stream through that cache and push out what was written just before, to memory
and back again. What `store_kept` stores is the last to go; the next layer writes over most of it.
It is for the results of norms, of products (not those of persistent/), of rotated queries, and of
attention whose programs share splits. Partial results of attention may be larger than the weights
of a product, and are read once: `drop_lines` has the cache forget them, so that they need not be
written to memory at all.
"""

from specdec.kernels import jit, tl

LINE = 128  # bytes of the cache


@jit
def store_kept(at, x, inside):
    """Store x at these pointers, where `inside` says so."""
    tl.store(at, x, mask=inside, eviction_policy="evict_last")


@jit
def drop_lines(at, inside):
    """Forget the lines of 128 bytes at these pointers, where `inside` says so.

    Their contents are undefined then, until they are written again. PTX: discard. For programs of
    one warp, which has loaded them all by then.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            setp.ne.s32 p, $2, 0;
            @p discard.global.L2 [$1], 128;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [at.to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
