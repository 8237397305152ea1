"""On how many GPUs does a published model have the bits of one? Write it into docs/limits.md.

    python -m scripts.write_equal_bits    prints the file if it changed

The answers are specdec/parallel/equal_bits.py's. A test fails while the table is out of date.
"""

from pathlib import Path

from scripts.tuned_models import CHANNELS, IN_FP8, KNOWN_MODELS, Sizes, target_of
from specdec.parallel.equal_bits import SIZES, Fit, fits_of
from weights.config import ExpertsConfig, TargetConfig

FILE = Path(__file__).parent.parent / "docs" / "limits.md"
BEGIN, END = "<!-- equal bits: begin -->\n", "<!-- equal bits: end -->\n"
LARGER = {  # that one GPU of 80 GB does not hold, or with other shapes
    "llama-3.3-70b": Sizes(8192, 28672, 64, 8, 128, 128256),
    "mistral-nemo-12b": Sizes(5120, 14336, 32, 8, 128, 131072),
    "qwen2.5-7b": Sizes(3584, 18944, 28, 4, 128, 152064),
    "qwen2.5-72b": Sizes(8192, 29568, 64, 8, 128, 152064),
}
WITH_EXPERTS = {
    "qwen3-30b-a3b": (
        Sizes(2048, 0, 32, 4, 128, 151936),
        ExpertsConfig(num=128, per_token=8, width=768, renormalise=True),
    ),
    "mixtral-8x7b": (
        Sizes(4096, 0, 32, 8, 128, 32000),
        ExpertsConfig(num=8, per_token=2, width=14336, renormalise=True),
    ),
    **{
        f"gpt-oss-{name}": (
            Sizes(2880, 0, 64, 8, 64, 201088),
            ExpertsConfig(num=num, per_token=4, width=2880, renormalise=True, form="mxfp4"),
        )
        for name, num in (("20b", 32), ("120b", 128))
    },
}

QUANTISED = ("llama-3.1-8b", "qwen3-8b", "qwen3-14b", "qwen3-32b")  # of KNOWN_MODELS, in FP8 too


def published() -> dict[str, TargetConfig]:
    """Give the published models whose sizes are known here, by name."""
    found = {name: target_of(sizes) for name, sizes in (KNOWN_MODELS | LARGER).items()}
    found |= {name: target_of(*sizes) for name, sizes in WITH_EXPERTS.items()}
    in_fp8 = {name: target_of(KNOWN_MODELS[name], forms=CHANNELS) for name in QUANTISED}
    return found | {f"{name}{IN_FP8}": target for name, target in in_fp8.items()}


def table() -> str:
    """Write a row for each model, and a column for each number of GPUs."""
    head = f"| model | {' | '.join(f'{size} GPUs' for size in SIZES)} |\n"
    rows = "".join(
        f"| {name} | {' | '.join(map(_cell, fits_of(target)))} |\n"
        for name, target in published().items()
    )
    return head + "|---" * (len(SIZES) + 1) + "|\n" + rows


def _cell(fit: Fit) -> str:
    words = {"equal": "equal", "other": "other bits", "none": "no"}[fit.bits]
    return f"{words}: {fit.reason}" if fit.reason else words


def generated() -> str:
    """Give the file's text with the table of today."""
    before, begin, rest = FILE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "the marks of what is generated are gone"
    return "".join([before, begin, table(), end, after])


def main() -> None:
    text = generated()
    if FILE.read_text() != text:
        FILE.write_text(text)
        print(FILE.name)


if __name__ == "__main__":
    main()
