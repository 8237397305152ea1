"""Valid checkpoints that an engine cannot take: refused at the load, by file.

Otherwise each request would be refused in its turn, for what no request can change.
"""

from pathlib import Path

from specdec.config import MAX_MODEL_LEN
from specdec.requests.tokenizer import Tokenizer
from specdec.requests.tokenizer_files import vocabulary_name
from specdec.sizes import MAX_STOP_IDS
from specdec.start.sizing import longest_context
from weights.config import TargetConfig
from weights.errors import Problems, shown

MOST_NAMED = 3  # of the tokens outside the vocabulary


def check_target(directory: Path, target: TargetConfig, max_model_len: int | None) -> None:
    """Refuse a context or a number of EOS ids that no engine is built for, by CheckpointError."""
    problems = Problems(directory)
    longest, limit = longest_context(target)
    if max_model_len is None and longest > MAX_MODEL_LEN:
        advice = f"give a max_model_len of at most {MAX_MODEL_LEN}"
        problems.add(f"config.json: {limit} is more than an engine takes: {advice}")
    if (count := len(target.eos_token_ids)) > MAX_STOP_IDS:
        what = f"eos_token_id has {count} ids, at most {MAX_STOP_IDS} are possible"
        problems.add(f"config.json and generation_config.json: {what}")
    problems.raise_if_any()


def check_tokenizer(directory: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse tokens whose ids the target has no embedding for, by CheckpointError."""
    outside = tokenizer.tokens_outside(vocab_size)
    if not outside:
        return
    named = ", ".join(f"{text!r:.60} {token}" for token, text in outside[:MOST_NAMED])
    problems = Problems(directory)
    problems.add(
        f"{vocabulary_name(directory)}: ids of {len(outside)} tokens are outside the target's "
        f"vocabulary (0 to {vocab_size - 1}): {shown(named)}{' ...' * (len(outside) > MOST_NAMED)}"
    )
    problems.raise_if_any()
