"""What runs: the models and how they run, in one line."""

from torch import Tensor

from specdec.llm import LLM


def headline(llm: LLM) -> str:
    """What was loaded and how it runs, in one line."""
    target = f"target {llm.target_report.format}, {dtype_name(llm)} on {hidden_states(llm).device}"
    if llm.draft_report is None:
        return f"{target}; no draft"
    K = llm.sizes.num_speculative_tokens
    tree = llm.sizes.tree
    drafts = f"as many drafts as pay, at most {K}" if llm.sizes.is_adaptive else f"K = {K}"
    if llm.sizes.has_both:
        drafts += ", chains or trees"
    elif tree is not None:
        drafts = f"trees of {tree.num_nodes} nodes, top_k = {tree.top_k}, {K} levels"
    threshold = llm.engine.runner.confidence_threshold
    if threshold:
        drafts += f", stopping below {threshold:g}"
    return f"{target}; draft {llm.draft_report.format}, {drafts}"


def hidden_states(llm: LLM) -> Tensor:
    """The buffer that has the engine's dtype and device."""
    return llm.engine.runner.buffers.hidden_states


def dtype_name(llm: LLM) -> str:
    """Of the activations."""
    return str(hidden_states(llm).dtype).removeprefix("torch.")
