"""`specdec cache`: compiled kernels from one machine to another with the same GPU and versions."""

from pathlib import Path

import specdec
from specdec.kernels.archive.entries import cache_directory
from specdec.kernels.archive.export import export_kernels
from specdec.kernels.archive.header import this_machine
from specdec.kernels.archive.install import import_kernels
from specdec.start.compile_ahead import kernel_names


def run_export(file: Path) -> None:
    """Write the archive, and say what is in it."""
    machine = this_machine()
    count = export_kernels(cache_directory(), kernel_names(), machine, file)
    print(_summary(file, count))
    print(f"for {machine.gpu}, Triton {machine.triton}, torch {machine.torch}")


def run_import(file: Path) -> None:
    """Install the archive, and say what is new."""
    machine = this_machine()
    cache = cache_directory()
    done = import_kernels(file, cache, machine)
    print(_summary(file, done.num_added + done.num_kept))
    print(f"{cache}: {done.num_added:,} added, {done.num_kept:,} kept")
    if done.version != specdec.__version__:
        print(
            f"exported by specdec {done.version}; "
            f"kernels that {specdec.__version__} changed are compiled at the next start"
        )


def _summary(file: Path, count: int) -> str:
    return f"{file}: {count:,} kernels, {file.stat().st_size / 1e6:.1f} MB"
