"""`specdec tune`: measure the tiles of a model's products on this GPU, for the user's own table."""

import json
from typing import NamedTuple

import torch

from specdec.cli.choices import TuneOptions
from specdec.kernels.tables import user_file
from specdec.kernels.tile_shapes import WIDE_DTYPES
from specdec.kernels.tiles import choose_order, gpu_name, source_of
from specdec.models.products import experts_of, products_of
from specdec.start.device import experts_line, home_relative
from specdec.start.locate import locate
from specdec.tune.gpu_clock import GpuClock
from specdec.tune.search import HEAD, Measured, Tuning
from weights.bars import bar
from weights.config import TargetConfig
from weights.draft.config import DraftConfig
from weights.draft.resolve import resolve_draft
from weights.files.reader import Reader
from weights.report import Log
from weights.target import resolve_target


def run_tune(options: TuneOptions) -> None:
    """Measure what neither table knows, or everything."""
    if not torch.cuda.is_available():
        raise ValueError("tune measures on an NVIDIA GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu, file = gpu_name(device), user_file()
    pair = resolve_pair(options.target, options.draft, options.dtype)
    products, experts = products_of(*pair), experts_of(pair.target)
    tuning = Tuning(
        clock=GpuClock(device),
        gpu=gpu,
        file=file,
        order_of=lambda product: choose_order(product, gpu),
        again=options.again,
    )
    wanted = tuning.missing(products)
    if not options.again:
        wanted = [p for p in wanted if source_of(p, gpu) != "shipped"]
    found: list[Measured] = []
    with bar(total=len(wanted), desc="products") as progress:
        for measured in tuning.run(wanted):
            if not options.json:  # a table that grows
                head = "" if found else f"{HEAD}   (microseconds)\n"
                progress.write(head + measured.table())
            found.append(measured)
            progress.update()
    if options.json:
        rows = [each.as_json() for each in found]
        by_rule = {} if experts is None else {"experts_by_rule": experts}
        print(json.dumps({"gpu": gpu, "file": str(file), "products": rows} | by_rule))
        return
    known = len(products) - len(wanted)
    rest = f"; {known} were known (--again measures them too)" if known else ""
    print(f"{len(found)} products measured for {gpu}, in {home_relative(file)}{rest}")
    if experts is not None:
        print(experts_line(experts))


class ResolvedPair(NamedTuple):
    """What the products of a target and its draft follow from."""

    target: TargetConfig
    eagle: DraftConfig | None
    dtype: str


def resolve_pair(target: str, draft: str | None, dtype: str) -> ResolvedPair:
    """Read configs and headers alone, no weight. dtype auto: as the target is stored."""
    reader = Reader(locate(target, "target"))
    config = resolve_target(reader, Log())
    reader.problems.raise_if_any()
    name = config.dtype if dtype == "auto" else dtype
    if name not in WIDE_DTYPES:
        raise ValueError(f"dtype={name}: tiles are measured for {' and '.join(WIDE_DTYPES)} only")
    eagle = None
    if draft is not None:
        reader = Reader(locate(draft, "draft"))
        eagle = resolve_draft(reader, config, None, Log()).config
        reader.problems.raise_if_any()
    return ResolvedPair(config, eagle, name)
