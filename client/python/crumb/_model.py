# SPDX-License-Identifier: Apache-2.0
"""Any causal model of transformers with its attention in our hands.

transformers looks its attention function up in a registry, by a name that the model is loaded with. Here that
name is "crumb"; what it does is the handler of the moment (`Model.attention`), so nothing of a model is edited.
"""
from __future__ import annotations

import contextlib
import math
import pathlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

try:
    import torch
    import transformers
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    raise ImportError(f"{error}; running models needs more packages: pip install 'crumb[models]'") from error

_NAME = "crumb"


@dataclass(frozen=True)
class Call:
    """One layer's attention for one text, keys after RoPE. Tensors are [1, heads, tokens, dim]."""
    layer: int  # Counted over the layers that have attention.
    module: Any
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    scale: float  # Of the scores.
    window: int  # How many keys a query sees, itself included; 0: all before it.
    arguments: dict[str, Any] = field(repr=False)

    def exact(self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None) -> torch.Tensor:
        """What the model would have computed, [1, heads, tokens, dim]; with other keys or values if given."""
        g = self.queries.shape[1] // self.keys.shape[1]
        k = (self.keys if keys is None else keys).repeat_interleave(g, 1)
        v = (self.values if values is None else values).repeat_interleave(g, 1)
        tokens = self.queries.shape[2]
        if 0 < self.window < tokens // 2:
            return self._in_blocks(k, v)
        return torch.nn.functional.scaled_dot_product_attention(
            self.queries, k, v, attn_mask=self.mask, is_causal=self.mask is None, scale=self.scale)

    def _in_blocks(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The same under a sliding window, a block of queries with the keys of their windows at a time."""
        step = max(64, self.window // 2)
        out = []
        for first in range(0, self.queries.shape[2], step):
            q = self.queries[:, :, first:first + step]
            last = first + q.shape[2]
            seen = max(0, first - self.window + 1)
            mask = _visible(range(first, last), range(seen, last), self.window, q.device)
            out.append(torch.nn.functional.scaled_dot_product_attention(
                q, keys[:, :, seen:last], values[:, :, seen:last], attn_mask=mask, scale=self.scale))
        return torch.cat(out, 2)


def _visible(queries: range, keys: range, window: int, device: torch.device) -> torch.Tensor:
    """bool [queries, keys]: whether the query at a position sees the key at another; window 0 is none."""
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)[None]
    return (j <= i) & (j > i - window) if window else j <= i


# Gives attention's output, [1, heads, tokens, dim].
Handler = Callable[[Call], torch.Tensor]


@dataclass(frozen=True)
class Attention:
    """What is common to a model's attention layers, and what is each layer's own."""
    layers: tuple[int, ...]  # The model's indices of the layers that have attention.
    windows: tuple[int, ...]  # Of each: as Call.window.
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)


# The registry's entry serves all models of the process, one at a time: this is whom it calls.
_current: list[Callable[..., torch.Tensor]] = []


def _dispatch(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None,
              **arguments: Any) -> tuple[torch.Tensor, None]:
    if not _current:
        raise RuntimeError("a model whose attention is crumb's was called outside of Model.attention()")
    out = _current[-1](module, query, key, value, attention_mask, scaling, arguments)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _mask(*positional: Any, **named: Any) -> torch.Tensor | None:
    """transformers' own: bool, True where a query sees a key; None where plain causality is all there is."""
    return sdpa_mask(*positional, **named)


AttentionInterface.register(_NAME, _dispatch)
AttentionMaskInterface.register(_NAME, _mask)


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Within, transformers warns of nothing but errors: its bars and hints are not about this package."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()


class Model:
    """A causal language model from a Hugging Face folder or a GGUF file."""

    def __init__(self, path: str, *, dtype: str = "float32", device: str = "cpu") -> None:
        """ValueError: what is at `path` is no model that transformers can run causally with a KV cache, or
        its attention does more than two-bit pages can hold; says what and where."""
        self.path = path
        where = pathlib.Path(path)
        if not where.exists():
            raise ValueError(f"{path}: no such folder or file; a Hugging Face model folder or a .gguf file is expected")
        arguments: dict[str, Any] = {}
        folder = where
        if where.is_file():
            if where.suffix != ".gguf":
                raise ValueError(f"{path}: a file that is not .gguf; name the model's folder")
            folder, arguments = where.parent, {"gguf_file": where.name}
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=getattr(torch, dtype), attn_implementation=_NAME, local_files_only=True, **arguments)
        except (OSError, ValueError, KeyError, NotImplementedError, TypeError) as error:
            raise ValueError(f"{path}: transformers cannot load it as a causal model: {error}") from error
        self.model.to(device).eval()
        self.device = device
        self.name = self._own_name(where)
        self._tokenizer_from = (str(folder), arguments)
        self._checked: set[tuple[int, int]] = set()  # (layer, tokens) whose mask is what its window says.
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]
        self.attention_of = self._probe()

    def _own_name(self, where: pathlib.Path) -> str:
        name = getattr(self.model.config, "_name_or_path", "") or str(where)
        return where.stem if where.is_file() else pathlib.Path(name).name or where.name

    def tokenizer(self) -> Any | None:
        """The tokenizer beside the model; None if there is none that can be read."""
        folder, arguments = self._tokenizer_from
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **arguments)
        except Exception:  # Whatever a tokenizer's loader raises, token ids serve as well.
            return None

    @contextlib.contextmanager
    def attention(self, handler: Handler) -> Iterator[None]:
        """Within, every attention layer of the model is `handler`'s.

        Calls raise ValueError where a layer's mask is neither causal nor the sliding window that it says it has.
        """
        places = {layer: i for i, layer in enumerate(self.attention_of.layers)}

        def call(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
                 scale: float | None, arguments: dict[str, Any]) -> torch.Tensor:
            place = places[module.layer_idx]
            one = Call(place, module, q, k, v, mask, scale or q.shape[-1] ** -0.5, self.attention_of.windows[place], arguments)
            if (place, q.shape[2]) not in self._checked:  # A mask is as large as the text squared.
                _check_mask(one)
                self._checked.add((place, q.shape[2]))
            return handler(one)
        _current.append(call)
        try:
            yield
        finally:
            _current.pop()

    @torch.inference_mode()
    def hidden(self, ids: Any) -> torch.Tensor:
        """The final states [tokens, width] of one text's ids [tokens]."""
        batch = torch.as_tensor(ids, dtype=torch.long, device=self.device)[None]
        return self.model.base_model(batch, use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of final states."""
        out = self.model.get_output_embeddings()(hidden).float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return out if cap is None else cap * torch.tanh(out / cap)

    # What a two-bit cache needs to be true, found by running a few tokens.
    def _probe(self) -> Attention:
        calls: dict[int, Call] = {}

        def record(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
                   scale: float | None, arguments: dict[str, Any]) -> torch.Tensor:
            layer = getattr(module, "layer_idx", None)
            if layer is None:
                raise ValueError(f"{self.path}: {type(module).__name__} does not say which layer it is")
            call = Call(layer, module, q, k, v, mask, scale or q.shape[-1] ** -0.5,
                        int(arguments.get("sliding_window") or 0), arguments)
            self._refuse(call)
            calls[layer] = call
            return call.exact()
        _current.append(record)
        try:
            ids = torch.arange(8) % self.vocabulary
            hidden = self.hidden(ids)
            whole = self.model(ids[None].to(self.device), use_cache=False).logits[0].float()
        finally:
            _current.pop()
        if not calls:
            raise ValueError(f"{self.path}: {type(self.model).__name__} makes no attention through transformers' registry: "
                             "it has no KV cache that could be held at two bits, or its code is too old for the registry")
        if not torch.allclose(whole, self.logits(hidden), rtol=1e-2, atol=1e-2):
            raise ValueError(f"{self.path}: {type(self.model).__name__}'s logits are not its output layer applied to its last "
                             "states; such models are not supported")
        return self._common(calls)

    def _refuse(self, call: Call) -> None:
        where = f"{self.path}: layer {call.layer} ({type(call.module).__name__})"
        named = {"softcap": "caps its scores (softcap)", "s_aux": "has attention sinks among its scores (s_aux)",
                 "position_bias": "adds a position bias to its scores (position_bias)"}
        for argument, what in named.items():
            if call.arguments.get(argument) is not None:
                raise ValueError(f"{where} {what}; attention over two-bit pages has no such term")
        causal = call.arguments.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise ValueError(f"{where} attends to later tokens too, so it has no KV cache: a causal decoder is needed")
        if call.queries.shape[1] % call.keys.shape[1]:
            raise ValueError(f"{where} has {call.queries.shape[1]} query heads, no multiple of its {call.keys.shape[1]} KV heads")

    def _common(self, calls: dict[int, Call]) -> Attention:
        def shape(call: Call) -> tuple[int, int, int, int]:
            return (call.queries.shape[1], call.keys.shape[1], call.keys.shape[3], call.values.shape[3])
        layers = sorted(calls)
        first = shape(calls[layers[0]])
        for layer in layers:
            other = shape(calls[layer])
            if other != first:
                text = "{} query heads, {} KV heads, head_dim {} of K and {} of V"
                raise ValueError(f"{self.path}: layer {layer} has {text.format(*other)} where layer {layers[0]} has "
                                 f"{text.format(*first)}; a profile holds one geometry, so this model is not supported")
        for name, dim in (("K", first[2]), ("V", first[3])):
            if dim % 32 or not 32 <= dim <= 512:
                raise ValueError(f"{self.path}: head_dim of {name} is {dim}; pages hold multiples of 32 from 32 to 512")
        return Attention(tuple(layers), tuple(calls[i].window for i in layers), *first)


def _check_mask(call: Call) -> None:
    """ValueError unless the mask is what `call.window` says: causal, and within the window if there is one."""
    tokens = call.queries.shape[2]
    if call.mask is None and (call.window == 0 or tokens <= call.window):
        return
    expected = _visible(range(tokens), range(tokens), call.window, torch.device("cpu"))
    seen = None if call.mask is None else call.mask.cpu()
    if seen is not None and seen.dtype != torch.bool:
        seen = seen > -math.inf if seen.dtype.is_floating_point and seen.min() == -math.inf else seen >= 0
    if seen is None or not torch.equal(seen.expand(1, 1, tokens, tokens)[0, 0], expected):
        raise ValueError(f"layer {call.layer} ({type(call.module).__name__}) has a mask that is neither causal nor a sliding "
                         f"window of {call.window or 'all'} tokens; such layers are not supported")
