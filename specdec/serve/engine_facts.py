"""What a server has to know of an engine before the first request."""

from dataclasses import dataclass
from pathlib import Path

from specdec.llm import LLM
from specdec.requests.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """tokenizer: its directory. recommended: the checkpoint's own sampling."""

    max_num_seqs: int
    max_model_len: int
    tokenizer: Path
    recommended: SamplingParams

    @staticmethod
    def of(llm: LLM) -> "EngineFacts":
        """Read from what was loaded."""
        return EngineFacts(
            max_num_seqs=llm.sizes.max_num_seqs,
            max_model_len=llm.sizes.max_model_len,
            tokenizer=llm.tokenizer.directory,
            recommended=llm.get_default_sampling_params(),
        )
