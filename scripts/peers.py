"""How compare_engines.py builds each engine and asks it for tokens, through its public class."""

import argparse
import subprocess
import time
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch

Generate = Callable[..., None]  # prompts, the number of tokens of each, sampling
PACKAGES = {"ours": "specdec", "vllm": "vllm", "sglang": "sglang"}


def build(args: argparse.Namespace) -> Generate:
    """Import the engine that was chosen, and no other; SystemExit if it is not installed."""
    name = PACKAGES[args.engine]
    try:
        package = import_module(name)
    except ModuleNotFoundError as error:
        where = f"pip install {name}, in an environment of its own"
        raise SystemExit(f"{args.engine}: {error}; {where}") from None
    return like_sglang(package, args) if args.engine == "sglang" else like_vllm(package, args)


def like_vllm(package: Any, args: argparse.Namespace) -> Generate:
    """Build an LLM of ours or of vLLM, which take the same arguments."""
    drafts = {"model": args.draft, "num_speculative_tokens": args.num_speculative_tokens}
    if args.engine == "vllm":
        drafts |= {"method": "eagle3", "use_local_argmax_reduction": True}
    sizes = {"max_num_seqs": args.batch, "max_model_len": args.max_model_len}
    options = {"enable_prefix_caching": False, **sizes, **args.options}
    llm = package.LLM(args.target, speculative_config=drafts, **options)

    def generate(prompts: list[list[int]], counts: list[int], **sampling: float) -> None:
        sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
        params = [package.SamplingParams(max_tokens=count, **sampling) for count in counts]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        assert [len(each.outputs[0].token_ids) for each in outputs] == counts

    return generate


def like_sglang(package: Any, args: argparse.Namespace) -> Generate:
    """Build an Engine of SGLang."""
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": args.draft}
    K = args.num_speculative_tokens
    drafts |= {"speculative_num_steps": K, "speculative_num_draft_tokens": K + 1}
    sizes = {"max_running_requests": args.batch, "context_length": args.max_model_len}
    options = {"speculative_eagle_topk": 1, "disable_radix_cache": True, **sizes, **args.options}
    llm = package.Engine(model_path=args.target, **drafts, **options)

    def generate(prompts: list[list[int]], counts: list[int], **sampling: float) -> None:
        sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
        params = [{"max_new_tokens": count, **sampling} for count in counts]
        outputs = llm.generate(input_ids=prompts, sampling_params=params)
        assert [each["meta_info"]["completion_tokens"] for each in outputs] == counts

    return generate


def settings(args: argparse.Namespace) -> dict:
    """Say what was measured, where, and by which versions."""
    is_gpu = torch.cuda.is_available()
    names = (PACKAGES[args.engine], "torch")
    found = {"date": time.strftime("%Y-%m-%d"), "engine": args.engine, **vars(args)}
    found["card"] = torch.cuda.get_device_name() if is_gpu else "CPU"
    found["versions"] = {name: metadata.version(name) for name in names}
    if args.engine == "ours":
        command = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found["commit"] = done.stdout.strip() or None
    return found
