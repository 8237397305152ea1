"""How many parts does a product leave in the shipped table? Chosen by scripts.tune_products alone.

The number with the least sum of times over three row classes, each over the best for its class, few
rows counting double, and reading counted in.
"""

from specdec.kernels.sum_order import Order, splits_of
from specdec.kernels.tables import Entry
from specdec.kernels.tile_shapes import PARTS, Product
from specdec.kernels.tiles import MOST_WALKED
from specdec.tune.gpu_clock import GpuClock
from specdec.tune.search import jobs_of, measure

PART_CLASSES = (16, 64, 256)  # decide the parts
FEW_ROWS = PART_CLASSES[0]
READING = 0.01  # share of a product's time for which its reader adds a further part


def orders_to_try(product: Product) -> tuple[Order, ...]:
    """List the orders to try for the shipped table; each part of K must be worth a program."""
    if product.kind != "split":
        return (Order(1, 1),)
    splits = splits_of(product.N, product.K)
    least = max(splits // MOST_WALKED, 1)
    counts = (n for n in PARTS if least <= n <= splits and (n == least or 512 * n <= product.K))
    return tuple(Order(splits, n) for n in counts)


def best_order(product: Product, clock: GpuClock, known: Entry | None = None) -> Order:
    """Take what a table has, if it is allowed; else measure where there is a choice."""
    orders = orders_to_try(product)
    kept = [order for order in orders if known is not None and order.parts == known.parts]
    if len(kept or orders) == 1:
        return (kept or orders)[0]
    has_wgmma = clock.has_wgmma
    clock.prepare(
        job for order in orders for job in jobs_of(product, order, PART_CLASSES, has_wgmma)
    )
    found = {order: measure(product, order, PART_CLASSES, clock).rows for order in orders}

    def cost(order: Order) -> float:
        total = 0.0
        for rows in PART_CLASSES:
            least = min(each[rows].us for each in found.values())
            total += (2 if rows == FEW_ROWS else 1) * found[order][rows].us / least
        return total * (1 + READING * (order.parts - 1))

    return min(orders, key=cost)
