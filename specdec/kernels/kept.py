"""Results that later kernels read: they are to stay in the L2 cache until then.

The weights of a pass stream through that cache and push out what was written just before, to memory
and back again. What is stored here is the last to go; the next layer writes over most of it. So do
products, but those of persistent/, norms, rotated queries, and attention where programs share it.
"""

from specdec.kernels import jit, tl


@jit
def store_kept(at, x, inside):
    """Store x at these pointers, where `inside` says so."""
    tl.store(at, x, mask=inside, eviction_policy="evict_last")
