"""Well-known arguments of vLLM that have no counterpart here: what to do instead, by name.

Each advice is one sentence, which follows "LLM does not take NAME: ". Arguments of vLLM that are
taken, some with one value only, are in config.py.
"""

from collections.abc import Mapping

_LORA = "LoRA is not supported: merge the adapter into the target's weights"
_MEDIA = "prompts are text or token ids, without pictures, sound or video: leave it out"
_ONE_HOST = "GPUs of one host share a model by tensor_parallel_size=: leave it out"
_NO_NGRAMS = "n-gram drafts do not exist: give an EAGLE draft as model of speculative_config"
_DRAFT = "give speculative_config={'model': DRAFT, 'num_speculative_tokens': K}"
_GRAPHS = "give cuda_graph_sizes= and cuda_graph_token_sizes=, or enforce_eager=True for no graphs"
_CONFIG_JSON = "a model is what its config.json says: change it there"
_TEXT_ONLY = "specdec generates text, without embedding, scoring or pooling: leave it out"
_STEPS = "give max_num_seqs=, max_num_batched_tokens= or max_prompt_slowdown= to plan steps"
_SAMPLING = "give SamplingParams (llm.get_default_sampling_params() has the checkpoint's)"
_GRAMMARS = "llguidance reads all grammars: leave it out, and give structured_outputs of a request"
_PROCESSORS = "give logit_bias, bad_words, allowed_token_ids or structured_outputs of a request"
_ON_DEVICE = "weights and cache stay on one device: leave it out, or give device='cpu'"
_NOT_LOGGED = "requests are never logged: leave it out"
_ONE_PLACE = "a request's cache stays where it is computed: leave it out"
_NO_TRACES = "there are no traces: leave it out, and see llm.get_metrics()"
_NOTHING = "it has no counterpart, and no effect on texts: leave it out"
_BEAMS = "beam search does not exist: give n= for several samples"
_RULE = "give acceptance='exact', 'rejection' or 'block'"
_OF_TARGET = "a draft runs as its target does: leave it out"


def _advice(by_text: Mapping[str, str]) -> dict[str, str]:
    return {name: text for text, names in by_text.items() for name in names.split()}


ENGINE = _advice(
    {
        _LORA: "enable_lora enable_lora_bias max_loras max_lora_rank max_cpu_loras lora_dtype "
        "lora_extra_vocab_size lora_modules fully_sharded_loras default_mm_loras "
        "enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token",
        _MEDIA: "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb "
        "mm_processor_cache_type mm_encoder_tp_mode mm_encoder_only disable_mm_preprocessor_cache "
        "disable_chunked_mm_input media_io_kwargs interleave_mm_strings enable_mm_embeds "
        "skip_mm_profiling allowed_local_media_path allowed_media_domains video_pruning_rate "
        "language_model_only enable_prompt_embeds",
        _ONE_HOST: "pipeline_parallel_size data_parallel_size data_parallel_size_local "
        "data_parallel_backend data_parallel_rank data_parallel_address data_parallel_rpc_port "
        "enable_expert_parallel decode_context_parallel_size prefill_context_parallel_size "
        "disable_custom_all_reduce max_parallel_loading_workers worker_use_ray worker_cls "
        "worker_extension_cls ray_workers_use_nsight placement_group enable_eplb eplb_config "
        "all2all_backend nnodes node_rank master_addr master_port",
        _NO_NGRAMS: "ngram_prompt_lookup_max ngram_prompt_lookup_min",
        _DRAFT: "speculative_model num_speculative_tokens speculative_model_quantization "
        "speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_disable_by_batch_size speculative_disable_mqa_scorer "
        "spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha",
        _GRAPHS: "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size "
        "max_seq_len_to_capture optimization_level",
        _CONFIG_JSON: "hf_overrides hf_config_path config_format model_impl rope_scaling "
        "rope_theta override_attention_dtype disable_sliding_window",
        _TEXT_ONLY: "runner convert pooler_config override_pooler_config",
        _STEPS: "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
        "num_scheduler_steps num_lookahead_slots scheduler_delay_factor scheduler_cls "
        "multi_step_stream_outputs stream_interval",
        "requests go by priority, then by arrival: leave it out": "scheduling_policy",
        _SAMPLING: "generation_config override_generation_config",
        _GRAMMARS: "guided_decoding_backend structured_outputs_config",
        _PROCESSORS: "logits_processors logits_processor_pattern",
        "give num_kv_blocks=, a number of blocks of 64 tokens": (
            "num_gpu_blocks_override kv_cache_memory_bytes"
        ),
        _ON_DEVICE: "cpu_offload_gb kv_offloading_size kv_offloading_backend",
        _NOT_LOGGED: "disable_log_requests enable_log_requests max_log_len",
        _ONE_PLACE: "kv_transfer_config kv_events_config ec_transfer_config",
        _NO_TRACES: "otlp_traces_endpoint collect_detailed_traces profiler_config",
        "llm.shutdown() gives the memory back: leave it out": "enable_sleep_mode",
        "`specdec serve --served-model-name` names a model: leave it out": "served_model_name",
        "a request may ask for 20 alternatives, or with -1 for all: leave it out": "max_logprobs",
        "logprobs are the target's own, before any processor: leave it out": "logprobs_mode",
        "no code of a checkpoint ever runs: leave it out": "code_revision",
        _NOTHING: "use_v2_block_manager preemption_mode prefix_caching_hash_algo "
        "disable_cascade_attn disable_hybrid_kv_cache_manager disable_async_output_proc "
        "calculate_kv_scales quantization_param_path safetensors_load_strategy "
        "pt_load_map_location model_loader_extra_config ignore_patterns additional_config "
        "attention_backend attention_config kv_sharing_fast_prefill engine_use_ray "
        "aggregate_engine_logging",
    }
)
SPECULATION = _advice(
    {
        _NO_NGRAMS: "prompt_lookup_max prompt_lookup_min",
        "give top_k= and num_draft_tokens= for trees": "speculative_token_tree",
        "as many drafts as pay are made, unless adaptive=False: leave it out": (
            "disable_by_batch_size"
        ),
        _RULE: "acceptance_method rejection_sample_method posterior_threshold posterior_alpha "
        "typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha",
        _OF_TARGET: "quantization max_model_len tensor_parallel_size enforce_eager dtype "
        "attention_backend moe_backend load_config draft_load_config code_revision "
        "disable_logprobs disable_log_stats disable_mqa_scorer disable_padded_drafter_batch "
        "suffix_decoding_max_tree_depth",
        "the checkpoint says whether drafts are parallel: leave it out": "parallel_drafting",
    }
)
SAMPLING = _advice(
    {
        "give n=, and choose by cumulative_logprob": "best_of",
        _BEAMS: "use_beam_search beam_width length_penalty early_stopping",
        "give structured_outputs={'json': SCHEMA}, or regex, choice or grammar": "guided_decoding",
        _PROCESSORS: "logits_processors",
        "cut the prompt before: give {'prompt_token_ids': ids[-n:]}": "truncate_prompt_tokens",
        "give detokenize=False, and decode the ids": "spaces_between_special_tokens",
        _NOTHING: "extra_args flat_logprobs skip_reading_prefix_cache",
    }
)
