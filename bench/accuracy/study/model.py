# SPDX-License-Identifier: Apache-2.0
"""Forward passes of a Llama or a Gemma 3 model straight from a GGUF file, with the attention left open.

Research code: float32, whole texts at once, no cache. `Model.hidden` calls
`attend(layer, q, k, v, scale, window)` with q [B, H, T, d] and k, v [B, H_kv, T, d] after RoPE; window is 0 for
attention to everything. Needs torch, numpy and gguf.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F


def causal(q_from, q_to, k_from, k_to, window, device):
    """[queries, keys] of bool: which key positions a query position sees."""
    i = torch.arange(q_from, q_to, device=device)[:, None]
    j = torch.arange(k_from, k_to, device=device)[None]
    return (j <= i) & (j > i - window) if window else j <= i


def exact_attention(layer, q, k, v, scale, window):
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    if not window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask = causal(0, q.shape[2], 0, q.shape[2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def floats(tensor, device):
    """A GGUF tensor as float32 on the device."""
    from gguf.quants import dequantize
    if tensor.tensor_type.name == "Q8_0":  # Blocks of fp16 scale and 32 int8; an embedding is large, so on the device.
        blocks = torch.from_numpy(np.array(tensor.data).view(np.uint8).reshape(-1, 34)).to(device)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].contiguous().view(torch.int8) * scale).view(*reversed(tensor.shape.tolist()))
    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)).to(device)


class Model:
    def __init__(self, path, device="cpu"):
        from gguf import GGUFReader
        reader = GGUFReader(path)
        self.w = {t.name: floats(t, device) for t in reader.tensors}
        field = lambda name: reader.fields[name].contents()
        arch = field("general.architecture")
        self.gemma = arch == "gemma3"
        if arch not in ("llama", "gemma3"):
            raise ValueError(f"{path}: architecture {arch}; llama and gemma3 are known")
        get = lambda name: field(f"{arch}.{name}")
        self.layers, self.heads = get("block_count"), get("attention.head_count")
        self.kv_heads, self.eps = get("attention.head_count_kv"), get("attention.layer_norm_rms_epsilon")
        self.dim = self.w["blk.0.attn_k.weight"].shape[0] // self.kv_heads
        self.base = get("rope.freq_base")
        self.device = device
        # Gemma 3: five layers of sliding-window attention, then one that sees everything.
        self.windows = [get("attention.sliding_window") if self.gemma and (i + 1) % 6 else 0 for i in range(self.layers)]

    def _norm(self, x, name):
        return F.rms_norm(x, (x.shape[-1],), self.w[name], self.eps)

    def _rope(self, x, base):
        """x [B, H, T, d]. Llama files hold pairs of neighbours, Gemma's a pair d / 2 apart."""
        d, t = x.shape[-1], x.shape[2]
        angle = torch.outer(torch.arange(t, device=x.device).double(),
                            base ** (-torch.arange(0, d, 2, device=x.device).double() / d))
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = (x[..., :d // 2], x[..., d // 2:]) if self.gemma else (x[..., 0::2], x[..., 1::2])
        a, b = a * cos - b * sin, a * sin + b * cos
        return torch.cat([a, b], -1) if self.gemma else torch.stack([a, b], -1).flatten(-2)

    def hidden(self, ids, attend):
        """The final normed states [B, T, D] of token ids [B, T]."""
        w, B, T = self.w, *ids.shape
        x = w["token_embd.weight"][ids]
        if self.gemma:
            x = x * math.sqrt(x.shape[-1])
        for i in range(self.layers):
            p = f"blk.{i}."
            y = self._norm(x, p + "attn_norm.weight")
            split = lambda name, n: (y @ w[p + name].T).view(B, T, n, self.dim).transpose(1, 2)
            q, k, v = split("attn_q.weight", self.heads), split("attn_k.weight", self.kv_heads), split("attn_v.weight", self.kv_heads)
            if self.gemma:
                q, k = self._norm(q, p + "attn_q_norm.weight"), self._norm(k, p + "attn_k_norm.weight")
            base = 10000.0 if self.windows[i] else self.base
            q, k = self._rope(q, base), self._rope(k, base)
            o = attend(i, q, k, v, self.dim ** -0.5, self.windows[i])
            o = o.transpose(1, 2).reshape(B, T, -1) @ w[p + "attn_output.weight"].T
            x = x + (self._norm(o, p + "post_attention_norm.weight") if self.gemma else o)
            y = self._norm(x, p + "ffn_norm.weight")
            gate = y @ w[p + "ffn_gate.weight"].T
            y = (F.gelu(gate, approximate="tanh") if self.gemma else F.silu(gate)) * (y @ w[p + "ffn_up.weight"].T)
            y = y @ w[p + "ffn_down.weight"].T
            x = x + (self._norm(y, p + "post_ffw_norm.weight") if self.gemma else y)
        return self._norm(x, "output_norm.weight")

    def loss(self, ids, attend, scored_from):
        """(sum of negative log likelihoods, count) of what follows positions scored_from and later."""
        x = self.hidden(ids, attend)[:, scored_from:-1].flatten(0, 1)
        y = ids[:, scored_from + 1:].flatten()
        total = 0.0
        for a, b in zip(x.split(4096), y.split(4096)):
            logits = a @ self.w.get("output.weight", self.w["token_embd.weight"]).T
            total += (logits.logsumexp(-1) - logits.gather(-1, b[:, None])[:, 0]).double().sum().item()
        return total, y.numel()
