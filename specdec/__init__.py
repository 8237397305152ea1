"""specdec: generation with EAGLE drafts whose output is that of plain decoding, bit for bit.

Shape letters, used in names (`hidden_TD`) all over the project:

    T tokens in the padded step      B requests in the padded step    R request rows of the state
    K draft tokens per round         Q = K + 1 query rows             V target vocabulary
    W draft vocabulary               D hidden size                    E width of the aux states
    H query heads                    G kv heads                       C channels of a head
    N cache blocks                   S slots per block                M blocks per request
    L layers
"""

import gc
import importlib
import importlib.util
from pathlib import Path

__version__ = "0.2.0"

_PUBLIC = {
    "LLM": "specdec.llm",
    "AsyncEngineArgs": "specdec.options",
    "AsyncLLM": "specdec.serve.async_llm",
    "EngineDeadError": "specdec.serve.engine_thread",
    "SamplingParams": "specdec.requests.params",
    "SpeculativeConfig": "specdec.speculative_config",
    "StructuredOutputsParams": "specdec.requests.structured_outputs",
    "RequestOutput": "specdec.requests.output",
    "RequestOutputKind": "specdec.requests.params",
    "CompletionOutput": "specdec.requests.output",
    "TextPrompt": "specdec.requests.intake",
    "TokensPrompt": "specdec.requests.intake",
}
__all__ = sorted(_PUBLIC)


def _check_neighbours() -> None:
    """ImportError if a script's own `graphs` or `weights` would be found instead of ours."""
    here = Path(__file__).parent.parent
    for name in ("graphs", "weights"):
        spec = importlib.util.find_spec(name)
        file = None if spec is None else spec.origin
        if file is None or Path(file) != here / name / "__init__.py":
            raise ImportError(
                f"specdec needs its own package {name!r} in {here}, but Python finds "
                f"{file or 'none'}: rename that file or folder, or run from another directory"
            )


_check_neighbours()


def __dir__() -> list[str]:
    """List the public names, also those that were not imported yet."""
    return __all__


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for, so that `import specdec` itself costs nothing.

    Meanwhile Python collects no garbage: modules leave none, and it would be an eighth of the time.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    finally:
        if was_enabled:
            gc.enable()
