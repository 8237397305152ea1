"""`specdec convert`: a directory of .bin files gets a model.safetensors."""

from pathlib import Path

from weights.convert import convert


def run_convert(directory: Path) -> None:
    """Convert, and say what was written."""
    result = convert(directory)
    print(f"{result}: {result.stat().st_size:,} bytes")
