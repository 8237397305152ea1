"""Compile attention in windows and with sinks for a Hopper GPU, without one.

python -m tests.specdec.kernels.compile_windows

Prints each kernel's name, and how many instructions of products its PTX has: without a window and
sinks, and with them.
"""

from tests.specdec.kernels.compile_needed import (
    ADDED_UP,
    CUT,
    HEADS,
    PATHS,
    combine,
    ptx_of,
    shared_splits,
    walk,
)

WALK = HEADS | CUT | PATHS | {"IS_HELPED": False, "SLOTS": 1, "SKIP": False, "IS_WIDE": False}
KERNELS = {
    "paths": (walk._paged_attention_kernel, WALK),
    "paths one by one": (walk._paged_attention_kernel, WALK | {"IS_SPLIT": False, "SHARED": 0}),
    "splits": (walk._paged_attention_kernel, WALK | {"HAS_PATHS": False, "LOOKS_FIRST": True}),
    "one loop": (
        walk._paged_attention_kernel,
        WALK | {"HAS_PATHS": False, "IS_SPLIT": False, "IN_ONE_LOOP": True},
    ),
    "chunk": (
        walk._paged_attention_kernel,
        WALK | {"HAS_PATHS": False, "IS_SPLIT": False, "SKIP": True, "TOKENS": 16},
    ),
    "teams": (shared_splits._share_splits_kernel, HEADS | CUT | {"SLOTS": 64, "LONG": False}),
    "combine": (
        combine._combine_kernel,
        HEADS | ADDED_UP | {"IS_SUMMED": False, "sharers": None, "fewer": None},
    ),
    "combine paths": (
        combine._combine_kernel,
        HEADS | ADDED_UP | {"IS_SUMMED": True, "sharers": None, "fewer": None},
    ),
}


def main() -> None:
    for name, (kernel, constants) in KERNELS.items():
        texts = (ptx_of(kernel, constants, False, given) for given in ((), ("window", "sinks_ptr")))
        counts = (text.count("mma.sync") + text.count("mma_async") for text in texts)
        print(name, *counts, sep=" ")


if __name__ == "__main__":
    main()
