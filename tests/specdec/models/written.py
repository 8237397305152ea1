"""What an engine writes with a target: tokens, and the logits from which it chose them."""

import dataclasses

import torch
from torch import Tensor

from specdec import SamplingParams
from specdec.runner import Runner
from specdec.sizes import EngineSizes, TreeShape
from specdec.start.load import assemble
from weights.load import LoadedEagle, LoadedTarget


@dataclasses.dataclass(frozen=True)
class Text:
    """What an engine wrote after a prompt, and the logits from which it chose each token."""

    tokens: list[int]
    logits_NV: Tensor


def written(target: LoadedTarget, prompt: list[int], num_tokens: int, chunk: int = 16) -> Text:
    """Let an engine without a draft write, one request alone."""
    runner = _runner(target, None, chunk, 0)
    heard: list[Tensor] = []
    logits = runner.target.model.logits

    def listen(hidden_XD: Tensor) -> Tensor:
        found = logits(hidden_XD)
        heard.append(found.clone())
        return found

    runner.target.model.logits = listen
    [tokens] = _generate(runner, target, [prompt], num_tokens, logprobs=0)
    return Text(tokens, torch.cat(heard)[:num_tokens])


def tokens_of(
    target: LoadedTarget,
    eagle: LoadedEagle | None,
    prompts: list[list[int]],
    num_tokens: int,
    chunk: int = 16,
    tree: TreeShape | None = None,
    num_drafts: int = 3,
) -> list[list[int]]:
    """Let an engine write after all prompts, with trees or drafts; two requests run at once.

    eagle: None: without drafts
    """
    runner = _runner(target, eagle, chunk, num_drafts if eagle is not None else 0, tree)
    return _generate(runner, target, prompts, num_tokens)


def _runner(
    target: LoadedTarget,
    eagle: LoadedEagle | None,
    chunk: int,
    num_drafts: int,
    tree: TreeShape | None = None,
) -> Runner:
    sizes = EngineSizes(
        max_model_len=192,
        max_num_seqs=2,
        max_num_batched_tokens=chunk,
        num_kv_blocks=8,
        num_speculative_tokens=num_drafts,
        tree=tree,
    )
    return Runner(target, eagle, sizes, torch.device("cpu"))


def _generate(
    runner: Runner, target: LoadedTarget, prompts: list[list[int]], num_tokens: int, **options
) -> list[list[int]]:
    engine = assemble(runner, target.config, SilentTokenizer(), is_async=False)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options)
    requests = engine.add_requests([(prompt, params) for prompt in prompts])
    while engine.has_unfinished:
        engine.step()
    return [request.token_ids for request in requests]


class SilentTokenizer:
    """Random targets have no text."""

    def decode(self, token_ids, skip_special_tokens=True):
        return ""
