"""Well-known arguments of vLLM that have no counterpart here: what to do instead, by name.

Each advice is one sentence, which follows "LLM does not take NAME: ". Arguments of vLLM that are
taken, some with one value only, are in config.py; rare ones are refused as any unknown name is.
"""

from collections.abc import Mapping

_NO_NGRAMS = "n-gram drafts do not exist: give an EAGLE draft as model of speculative_config"
_PROCESSORS = "give logit_bias, bad_words, allowed_token_ids or structured_outputs of a request"
_NOTHING = "it has no counterpart, and no effect on texts: leave it out"


def _advice(by_text: Mapping[str, str]) -> dict[str, str]:
    return {name: text for text, names in by_text.items() for name in names.split()}


ENGINE = _advice(
    {
        "LoRA is not supported: merge the adapter into the target's weights": "enable_lora "
        "max_loras max_lora_rank max_cpu_loras lora_dtype lora_modules fully_sharded_loras "
        "lora_extra_vocab_size enable_prompt_adapter max_prompt_adapters",
        "prompts are text or token ids, without pictures, sound or video: leave it out": (
            "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb enable_prompt_embeds "
            "disable_mm_preprocessor_cache allowed_local_media_path interleave_mm_strings"
        ),
        "a model runs on one GPU: leave it out (specdec.fleet runs an engine on each of several)": (
            "pipeline_parallel_size data_parallel_size enable_expert_parallel worker_use_ray "
            "decode_context_parallel_size disable_custom_all_reduce max_parallel_loading_workers "
            "worker_cls worker_extension_cls"
        ),
        _NO_NGRAMS: "ngram_prompt_lookup_max ngram_prompt_lookup_min",
        "give speculative_config={'model': DRAFT, 'num_speculative_tokens': K}": (
            "speculative_model num_speculative_tokens speculative_draft_tensor_parallel_size "
            "speculative_max_model_len speculative_disable_by_batch_size"
        ),
        "give cuda_graph_sizes= and cuda_graph_token_sizes=, or enforce_eager=True for no graphs": (
            "compilation_config cudagraph_capture_sizes max_seq_len_to_capture optimization_level"
        ),
        "a model is what its config.json says: change it there": "hf_overrides config_format "
        "model_impl rope_scaling rope_theta disable_sliding_window",
        "specdec generates text, without embedding, scoring or pooling: leave it out": "runner "
        "convert pooler_config override_pooler_config",
        "give max_num_seqs=, max_num_batched_tokens= or max_prompt_slowdown= to plan steps": (
            "max_num_partial_prefills long_prefill_token_threshold num_scheduler_steps "
            "num_lookahead_slots scheduler_delay_factor multi_step_stream_outputs"
        ),
        "requests go by priority, then by arrival: leave it out": "scheduling_policy",
        "give SamplingParams (llm.get_default_sampling_params() has the checkpoint's)": (
            "generation_config override_generation_config"
        ),
        "llguidance reads all grammars: leave it out, and give structured_outputs of a request": (
            "guided_decoding_backend structured_outputs_config"
        ),
        _PROCESSORS: "logits_processors logits_processor_pattern",
        "give num_kv_blocks=, a number of blocks of 64 tokens": "num_gpu_blocks_override "
        "kv_cache_memory_bytes",
        "weights and cache stay on one device: leave it out, or give device='cpu'": (
            "cpu_offload_gb kv_offloading_size"
        ),
        "requests are never logged: leave it out": "disable_log_requests enable_log_requests",
        "a request's cache stays where it is computed: leave it out": "kv_transfer_config",
        "there are no traces: leave it out, and see llm.get_metrics()": "otlp_traces_endpoint "
        "collect_detailed_traces",
        "llm.shutdown() gives the memory back: leave it out": "enable_sleep_mode",
        "`specdec serve --served-model-name` names a model: leave it out": "served_model_name",
        "a request may ask for 20 alternatives, or with -1 for all: leave it out": "max_logprobs",
        "logprobs are the target's own, before any processor: leave it out": "logprobs_mode",
        "no code of a checkpoint ever runs: leave it out": "code_revision",
        _NOTHING: "use_v2_block_manager preemption_mode prefix_caching_hash_algo "
        "disable_cascade_attn disable_async_output_proc calculate_kv_scales additional_config "
        "quantization_param_path model_loader_extra_config ignore_patterns attention_backend",
    }
)
SPECULATION = _advice(
    {
        _NO_NGRAMS: "prompt_lookup_max prompt_lookup_min",
        "give top_k= and num_draft_tokens= for trees": "speculative_token_tree",
        "as many drafts as pay are made, unless adaptive=False: leave it out": (
            "disable_by_batch_size"
        ),
        "give acceptance='exact', 'rejection' or 'block'": "acceptance_method "
        "rejection_sample_method posterior_threshold posterior_alpha",
        "a draft runs as its target does: leave it out": "quantization max_model_len "
        "tensor_parallel_size enforce_eager dtype attention_backend code_revision "
        "disable_logprobs disable_mqa_scorer disable_padded_drafter_batch",
    }
)
SAMPLING = _advice(
    {
        "give n=, and choose by cumulative_logprob": "best_of",
        "beam search does not exist: give n= for several samples": "use_beam_search beam_width "
        "length_penalty early_stopping",
        "give structured_outputs={'json': SCHEMA}, or regex, choice or grammar": "guided_decoding",
        _PROCESSORS: "logits_processors",
        "cut the prompt before: give {'prompt_token_ids': ids[-n:]}": "truncate_prompt_tokens",
        "give detokenize=False, and decode the ids": "spaces_between_special_tokens",
        _NOTHING: "extra_args flat_logprobs skip_reading_prefix_cache",
    }
)
