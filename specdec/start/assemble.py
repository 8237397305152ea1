"""From a runner that is ready to an engine that takes requests: the one place that joins both."""

from specdec.engine import Engine
from specdec.requests.intake import Intake
from specdec.requests.tokenizer import Tokenizer
from specdec.runner import Runner
from weights.config import TargetConfig


def assemble(
    runner: Runner,
    target: TargetConfig,
    tokenizer: Tokenizer,
    *,
    seed: int | None = None,
    use_prefix_cache: bool = False,
    is_async: bool | None = None,
) -> Engine:
    """seed: of the seeds that are drawn, None by chance. is_async: run ahead; None: on a GPU."""
    intake = Intake(
        tokenizer, runner.sizes, target.vocab_size, target.eos_token_ids, seed, runner.acceptance
    )
    is_async = runner.device.type == "cuda" if is_async is None else is_async
    return Engine(runner, intake, use_prefix_cache=use_prefix_cache, num_steps_ahead=int(is_async))
