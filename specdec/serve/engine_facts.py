"""What a server has to know of an engine before the first request."""

import os
from dataclasses import dataclass
from pathlib import Path

from specdec.llm import LLM
from specdec.requests.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """tokenizer: its directory. recommended: the checkpoint's own sampling.

    draft: its name, None without one. num_speculative_tokens: of a round, at most if is_adaptive.
    """

    max_num_seqs: int
    max_model_len: int
    tokenizer: Path
    recommended: SamplingParams
    draft: str | None
    num_speculative_tokens: int
    is_adaptive: bool

    @staticmethod
    def of(llm: LLM) -> "EngineFacts":
        """Read from what was loaded."""
        return EngineFacts(
            max_num_seqs=llm.sizes.max_num_seqs,
            max_model_len=llm.sizes.max_model_len,
            tokenizer=llm.tokenizer.directory,
            recommended=llm.get_default_sampling_params(),
            draft=draft_name(llm.speculative_config),
            num_speculative_tokens=llm.sizes.num_speculative_tokens,
            is_adaptive=llm.sizes.is_adaptive,
        )


def draft_name(config: SpeculativeConfig | None) -> str | None:
    """What clients may know of a draft: of a directory its own name, not where it lies."""
    if config is None:
        return None
    name = str(config.model)
    return Path(name).name if os.path.isdir(os.path.expanduser(name)) else name
