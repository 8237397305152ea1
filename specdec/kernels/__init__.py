"""Kernels: one file each, with its public function, its Triton kernel and its torch twin.

Here is the project's one device check: Triton is imported where it can run (a CUDA device, or its interpreter), and
`use_triton(tensor)` says whether a call goes to the kernel or to the twin.
"""
