"""How many splits does a product take in the shipped table? Chosen by scripts.tune_products alone.

The one with the least sum of times over three row classes, each over the best for its class, few
rows counting double, and reading counted in.
"""

from specdec.kernels.tile_shapes import SPLITS, Product
from specdec.tune.gpu_clock import GpuClock
from specdec.tune.search import jobs_of, measure

SPLIT_CLASSES = (16, 64, 256)  # decide the splits
FEW_ROWS = SPLIT_CLASSES[0]
READING = 0.01  # share of a product's time for which its reader adds a further split


def splits_to_try(product: Product) -> tuple[int, ...]:
    """List the splits to try for the shipped table; each part of K must be worth a program."""
    can_split = product.kind == "split"
    return tuple(n for n in SPLITS if n == 1 or (can_split and 512 * n <= product.K))


def best_splits(product: Product, clock: GpuClock) -> int:
    """Measure where there is a choice."""
    counts = splits_to_try(product)
    if len(counts) == 1:
        return counts[0]
    has_wgmma = clock.has_wgmma
    clock.prepare(
        job for count in counts for job in jobs_of(product, count, SPLIT_CLASSES, has_wgmma)
    )
    found = {count: measure(product, count, SPLIT_CLASSES, clock).rows for count in counts}

    def cost(count: int) -> float:
        total = 0.0
        for rows in SPLIT_CLASSES:
            least = min(each[rows].us for each in found.values())
            total += (2 if rows == FEW_ROWS else 1) * found[count][rows].us / least
        return total * (1 + READING * (count - 1))

    return min(counts, key=cost)
