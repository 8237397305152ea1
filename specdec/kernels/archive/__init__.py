"""Compiled kernels in a file, for another machine with the same GPU and versions.

The file is a .tar.gz: `header.json`, then for each entry of Triton's cache its binary and metadata,
and the C extensions by which Triton talks to the driver. What an import installs is run later as it
is, so only files of a trusted source should be imported; the checks here are for mistakes, and keep
an import from writing anywhere but into the cache.
"""
