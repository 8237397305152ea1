"""Optional packages that a command needs: if one is missing, the line says how to install it."""

from collections.abc import Sequence
from importlib.util import find_spec


def require_extra(command: str, extra: str, modules: Sequence[str]) -> None:
    """ValueError if a module of the extra is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        install = f'pip install -c constraints.txt -e ".[{extra}]"'
        raise ValueError(f"{command} needs {', '.join(missing)}: {install}")
