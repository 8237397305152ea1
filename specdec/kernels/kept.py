"""Results that later kernels read: they are to stay in the L2 cache until then.

The weights of a pass stream through that cache and push out what was written just before, to memory
and back again. What is stored here is the last to go; the next layer writes over most of it. These
stores are for the results of norms, of products (not those of persistent/), of rotated queries, and
of attention whose programs share splits.
"""

from specdec.kernels import jit, tl


@jit
def store_kept(at, x, inside):
    """Store x at these pointers, where `inside` says so."""
    tl.store(at, x, mask=inside, eviction_policy="evict_last")
