"""What lies in the caches of an engine that runs one request."""

import torch


def cache_rows(llm, name, num_tokens):
    """Keys and values of the only request, [L, 2, tokens, G, C], in the first blocks."""
    cache = getattr(llm.engine.runner, name)
    return cache.transpose(3, 4).flatten(2, 3)[:, :, :num_tokens]


def poison_nodes(llm):
    """Before each step, NaN wherever nodes of trees have been."""
    runner = llm.engine.runner
    real = runner.acts.run

    def run(step):
        for cache in (runner.target_cache, runner.draft_cache):
            cache[:, :, runner.sizes.num_kv_blocks :] = torch.nan
        real(step)

    runner.acts.run = run
