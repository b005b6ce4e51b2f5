# SPDX-License-Identifier: Apache-2.0
"""Small models of random weights, in folders as a user has them."""
import numpy as np
import torch
import transformers

VOCABULARY = 96
COMMON = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, pad_token_id=0)


def llama(**changes):
    return transformers.LlamaConfig(**COMMON | dict(num_key_value_heads=2, head_dim=32) | changes)


def gemma3(**changes):
    """Normed queries and keys, one KV head for four query heads, a sliding window in the first layer."""
    return transformers.Gemma3TextConfig(**COMMON | dict(
        num_key_value_heads=1, head_dim=32, sliding_window=200, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"]) | changes)


def deepseek(**changes):
    """K and V of different head_dim."""
    return transformers.DeepseekV2Config(**COMMON | dict(
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=48, v_head_dim=32,
        first_k_dense_replace=2, n_routed_experts=2, num_experts_per_tok=1, n_shared_experts=1, moe_intermediate_size=32,
        n_group=1, topk_group=1) | changes)


def save(config, folder, model_class=None):
    """A model of this configuration in `folder`, the same each time."""
    torch.manual_seed(1)
    make = model_class or transformers.AutoModelForCausalLM.from_config
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():  # Larger than at the begin of training: attention should look somewhere.
            if parameter.ndim == 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def texts(count=3, tokens=400):
    return [np.random.default_rng(seed).integers(0, VOCABULARY, size=tokens) for seed in range(count)]


def cache_of(folder, ids):
    """(keys, values) of each layer, [heads, tokens, dim], as the model's own cache holds them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        cache = model(torch.as_tensor(ids)[None], use_cache=True).past_key_values
    return [(layer.keys[0].numpy(), layer.values[0].numpy()) for layer in cache.layers]
