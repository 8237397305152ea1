"""x W^T for many rows on a Hopper GPU: one program a multiprocessor, its warps with roles.

One warp lets the copy engine fill a ring of tiles of W and x. Two or three groups of four warps
multiply: 64 rows of the tile of W each by all of its rows of x, with the products in flight while
the next tiles arrive. Results leave through shared memory, in whole lines, while the next tile is
multiplied; results of 16 bits are held in registers and leave piece by piece then. With tiles of x
of 256 rows, 8 gate and 8 up rows take turns, so that one product has both. No launch writes W, so
its first tiles are read before the launch before this one has ended.

A sum has the order that linear.py describes, and its bits: W is on the wide side, a split adds 16
of K after another, and a program that walks splits adds neighbours first. The number of tiles is
seldom a multiple of the multiprocessors, and those of a last turn would leave many idle: their rows
are cut, so that more programs have some.

To be read in this order: launch.py (the host), kernel.py (the tuples that functions share, a
program's shared memory, its warps' roles, and the role of four warps, with results held for the
next tile), items.py (which tiles of results a program makes, equal for all of its warps),
copying.py (the role of the one warp), blocks.py and products.py (the sums of an item), fp8.py (the
same of 8-bit numbers), results.py (bias, SwiGLU, and out).
"""
