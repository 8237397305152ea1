"""Errors of the engine in the words of a command: `max_model_len=64` becomes `--max-model-len 64`.

Advice about an argument that the command has no option for is left out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weights.errors import CheckpointError

# advice that helps in Python only
PYTHON_ONLY = (
    (r", or None for the end of the context", ""),
    (r", or None( to have one drawn| for the engine's)?", ", or leave it out"),
    (r"max_num_batched_tokens=\d+ or ", ""),
    (r", max_num_seqs or max_num_batched_tokens", " or max_num_seqs"),
    (r"num_kv_blocks=(\d+): raise num_kv_blocks, or lower", r"there are \1: lower"),
)
LENGTH = "max_model_len"


@dataclass(frozen=True, slots=True)
class Wording:
    """Knows the options of a command, by the argument that each sets.

    has_length: --max-model-len is given. If not, the length is the longest there is.
    """

    options: Mapping[str, str]
    has_length: bool = False

    @staticmethod
    def of(params: Iterable[object], has_length: bool) -> "Wording":
        """Make the words of a command with these parameters."""
        options = {}
        for param in params:
            name = getattr(param, "name", "")
            option = f"--{name.replace('_', '-')}"
            if option in getattr(param, "opts", ()):
                options[name] = option
        if "draft" in options:
            options["model"] = "--draft"
        return Wording(options, has_length)

    def line(self, error: Exception) -> str:
        """Word an error in one line, unless it lists several problems of a checkpoint."""
        if not isinstance(error, CheckpointError):
            return self.text(re.sub(r"\s*\n\s*", " ", str(error)))
        if len(error.problems) > 1:
            return str(error)
        # it names keys of the checkpoint, which are no options; only a length may be advised
        problem, option = error.problems[0], self.options.get(LENGTH)
        problem = problem if option is None else _with_option(problem, LENGTH, option)
        return f"{error.directory}: {problem}; nothing loaded"

    def text(self, text: str) -> str:
        """Word a message about options."""
        for pattern, words in PYTHON_ONLY:
            text = re.sub(pattern, words, text)
        if not self.has_length:
            text = text.replace(f", or raise {LENGTH}", "")
        for name, option in self.options.items():
            text = _with_option(text, name, option)
        return text


def _with_option(text: str, name: str, option: str) -> str:
    """Write name=value as `--name value`, name=True as `--name`; a bare name only if it has a _."""
    begin = rf"(?<![\w./-]){name}"
    text = re.sub(rf"{begin}=True\b", option, text)
    text = re.sub(rf"{begin}=", f"{option} ", text)
    return re.sub(rf"{begin}(?![\w-]|\.\w)", option, text) if "_" in name else text
