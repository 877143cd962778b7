"""Bodies of the stand-in, in the shape that SGLang 0.5.17 was recorded with.

MODEL_INFO has every key of the recording; SERVER_INFO only those of its 465 that a deployer reads.
"""

from __future__ import annotations

from typing import Any

MODEL_INFO: dict[str, Any] = {
    "model_path": "/models/smollm2",
    "tokenizer_path": "/models/smollm2",
    "is_generation": True,
    "preferred_sampling_params": None,
    "weight_version": "default",
    "has_image_understanding": False,
    "has_audio_understanding": False,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "embedding": {
        "family": "none",
        "task": "none",
        "execution": "none",
        "attention": "none",
        "pooling": "model_defined",
        "normalize": False,
        "postprocessor": "none",
        "tokenizer_special_tokens": "model_default",
        "supports_dimensions": False,
        "supports_token_embeddings": False,
        "supports_multimodal": False,
        "requires_embedding_flag": False,
        "auto_enable_embedding": False,
        "bcg_eligibility": "disabled",
        "safe_disable_kv_cache": False,
        "safe_disable_radix_cache": False,
        "safe_disable_chunked_prefill": False,
        "enabled": False,
        "matryoshka_dimensions": [],
        "bcg": {
            "prefill_backend": "breakable",
            "enabled": True,
            "capture_token_budget": 8192,
            "capture_batch_sizes": [4, 8],
        },
        "cache": {"kv_cache_disabled": False, "radix_cache_disabled": False, "chunked_prefill_disabled": False},
    },
}

SERVER_INFO: dict[str, Any] = {
    "tp_size": 1,
    "dp_size": 1,
    "device": "cpu",
    "mem_fraction_static": 0.3,
    "max_running_requests": 512,
    "max_total_tokens": None,
    "attention_backend": "torch_native",
    "enable_metrics": True,
    "skip_server_warmup": False,
    "speculative_algorithm": None,
    "status": "ready",
    "max_total_num_tokens": 1930503,
    "max_req_input_len": 8186,
    "kv_events": None,
    "internal_states": [
        {
            "last_gen_throughput": 0.0,
            "effective_max_running_requests_per_dp": 512,
            "memory_usage": {
                "weight": 0.266,
                "kvcache": 41.424,
                "startup_available": 96.534,
                "token_capacity": 1930503,
                "token_capacity_swa": None,
                "graph": {
                    "prefill": 0.484,
                    "decode": 0.137,
                    "target_verify": 0.0,
                    "draft_prefill": 0.0,
                    "draft_decode": 0.0,
                    "draft_extend": 0.0,
                },
            },
        }
    ],
}
