"""`specdec generate --json`: an output as one JSON object."""

from dataclasses import asdict

import specdec
from specdec.cli.headline import device_name, dtype_name
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.stats import RoundRecord


def as_json(llm: "specdec.LLM", output: RequestOutput, has_rounds: bool) -> dict[str, object]:
    """Return all that a program may need from one output."""
    result = _sample_as_json(output.outputs[0]) | {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "target": str(llm.target_report.directory),
        "draft": None if llm.draft_report is None else str(llm.draft_report.directory),
        "num_speculative_tokens": llm.sizes.num_speculative_tokens,
        "draft_top_k": _draft_top_k(llm),
        "num_draft_tokens": llm.sizes.num_draft_tokens,
        "draft_confidence_threshold": llm.engine.runner.confidence_threshold,
        "acceptance": llm.engine.runner.acceptance,
        "seed": output.seed,
        "dtype": dtype_name(llm),
        "device": device_name(llm),
        "stats": output.stats.as_dict(),
    }
    if len(output.outputs) > 1:
        result["samples"] = [_sample_as_json(sample) for sample in output.outputs]
    if has_rounds:
        result["rounds"] = [_round_as_json(record) for record in output.stats.rounds]
    return result


def _draft_top_k(llm: "specdec.LLM") -> int | None:
    """Return the option's value: None where drafts are chains or trees, as it pays."""
    if llm.sizes.has_both:
        return None
    return 1 if llm.sizes.tree is None else llm.sizes.tree.top_k


def _round_as_json(record: RoundRecord) -> dict[str, object]:
    """Leave parents out where a round had no tree."""
    found = asdict(record)
    return found if found.pop("parents") == () else {**found, "parents": record.parents}


def _sample_as_json(completion: CompletionOutput) -> dict[str, object]:
    result: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        tokens = [
            {str(i): found._asdict() for i, found in row.items()} for row in completion.logprobs
        ]
        result |= {"logprobs": tokens, "cumulative_logprob": completion.cumulative_logprob}
    return result
