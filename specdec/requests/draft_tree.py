"""The shape of a draft tree as the host knows it: the parent's row of each node.

Row 0 is the root, no node; row i is the i-th node, and its parent comes before it.
"""

from collections.abc import Sequence


def depths(parents: Sequence[int]) -> list[int]:
    """List the depth of all rows: 0 for the root, 1 for its children."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def leaf_paths(parents: Sequence[int], num_levels: int) -> list[list[int]]:
    """List the rows from the root to each node without children; deeper levels are left out."""
    depth_of = depths(parents)
    inside = [row for row, depth in enumerate(depth_of) if depth <= num_levels]
    inner = {parents[row - 1] for row in inside if row > 0}
    return [path_to(row, parents) for row in inside if row not in inner]


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    """List the rows from the root to this one."""
    return [*path_to(parents[row - 1], parents), row] if row > 0 else [0]
