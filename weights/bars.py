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
