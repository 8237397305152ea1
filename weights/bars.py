"""Progress bars where they are seen: on a terminal, and in a notebook, which has its own."""

import sys

from tqdm.auto import tqdm


def is_screen() -> bool:
    """Whether standard error is a terminal, or the output of a notebook's cell."""
    return is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def is_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def bar(*args: object, is_wanted: bool = True, **options: object) -> tqdm:
    """A bar with the arguments of tqdm; hidden where there is no screen."""
    return tqdm(*args, disable=not (is_wanted and is_screen()), **options)


def size_text(num_bytes: int) -> str:
    """Gigabytes, or megabytes below one."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.0f} MB"


class ByteBar:
    """Progress to a known number of bytes: a bar on a screen, elsewhere a line for each tenth."""

    def __init__(self, total: int, desc: str) -> None:
        self._total = total
        self._desc = desc
        self._done = 0
        self._bar = bar(total=total, desc=desc, unit="B", unit_scale=True)

    def __enter__(self) -> "ByteBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def update(self, num_bytes: int) -> None:
        """Count what was done since the last call."""
        before = 10 * self._done // self._total
        self._done += num_bytes
        self._bar.update(num_bytes)
        if self._bar.disable and 10 * self._done // self._total > before:
            done, total = size_text(self._done), size_text(self._total)
            print(f"{self._desc}: {done} of {total}", file=sys.stderr, flush=True)
