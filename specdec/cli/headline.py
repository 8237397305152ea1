"""What runs: the models and how they run, in one line."""

import sys

import specdec


def say_what_runs(llm: "specdec.LLM") -> None:
    """Print the line, and choose the number of threads, now that the engine has imported torch."""
    from specdec.cli.threads import choose_threads

    print(headline(llm), file=sys.stderr)
    choose_threads(llm.engine.runner)


def headline(llm: "specdec.LLM") -> str:
    """Say in one line what was loaded and how it runs."""
    target = f"target {llm.target_report.format}, {dtype_name(llm)} on {device_name(llm)}"
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


def device_name(llm: "specdec.LLM") -> str:
    """Name the device that an engine runs on."""
    return str(llm.engine.runner.buffers.hidden_states.device)


def dtype_name(llm: "specdec.LLM") -> str:
    """Name the type of an engine's activations."""
    return str(llm.engine.runner.buffers.hidden_states.dtype).removeprefix("torch.")
