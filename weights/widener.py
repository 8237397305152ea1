"""The tensors of a small Llama and its EAGLE drafts at larger sizes, with the same behaviour.

Streams keep their channels and gain some that stay 0; weights that read those are noise. RMSNorm
weights times sqrt(h/H) and eps times h/H undo the larger mean. Rotary pair i of a head goes to the
pair of the same frequency. The small layers are placed so that the streams at the draft's
boundaries are the same; layers between them add nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

BELOW = 8.0
NORMS = ("input_layernorm", "post_attention_layernorm", "hidden_norm")  # over a stream


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes under the names of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Ends of the stretches of layers: EAGLE-3 reads there, so the streams must be the same."""
        L = self.num_hidden_layers
        return 2, L // 2, L - 3, L


NAMES = tuple(field.name for field in fields(Shape))


class Widener:
    """Tensors of the small shape in, tensors of the big one out; added stream channels stay 0.

    ValueError: the big head_dim is no multiple of the small one.
    """

    def __init__(self, small: Shape, big: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.small = small
        self.big = big
        self.dtype = dtype
        self.device = device
        has_data = device.type != "meta"
        self.generator = torch.Generator(device).manual_seed(0) if has_data else None
        ratio, rest = divmod(big.head_dim, small.head_dim)
        if rest:
            raise ValueError(
                f"head_dim={big.head_dim} of the wide pair: a multiple of the small pair's "
                f"{small.head_dim} is needed, whose rotary frequencies it must have"
            )
        # rotary pairs i and ratio * i have the same frequency
        pairs = torch.arange(small.head_dim // 2, device=device) * ratio
        self.rotary = torch.cat([pairs, pairs + big.head_dim // 2])
        self.plain = torch.arange(small.head_dim, device=device)
        self.kv_heads = torch.arange(small.num_key_value_heads, device=device)
        group = torch.arange(small.num_attention_heads // small.num_key_value_heads, device=device)
        big_group = big.num_attention_heads // big.num_key_value_heads
        self.q_heads = (self.kv_heads[:, None] * big_group + group).flatten()

    def noise(self, *shape: int) -> Tensor:
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        return (noise * 0.02).to(self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def norm(self, weight: Tensor) -> Tensor:
        """Added channels of 0 make the mean smaller, and so must the weight (and eps) be."""
        out = torch.ones(self.big.hidden_size, dtype=self.dtype, device=self.device)
        out[: len(weight)] = weight * math.sqrt(self.small.hidden_size / self.big.hidden_size)
        return out

    def inputs(self, weight: Tensor, num_rows: int | None = None) -> Tensor:
        """Columns that read one or several streams; those of added channels are noise."""
        h, H = self.small.hidden_size, self.big.hidden_size
        blocks = weight.shape[1] // h
        out = self.noise(num_rows or len(weight), blocks * H).view(-1, blocks, H)
        out[: len(weight), :, :h] = weight.view(-1, blocks, h).to(self.dtype)
        return out.flatten(1)

    def outputs(self, weight: Tensor, num_columns: int) -> Tensor:
        """Rows that write a stream: nothing to added channels, nothing from added columns."""
        out = self.zeros(self.big.hidden_size, num_columns)
        out[: len(weight), : weight.shape[1]] = weight.to(self.dtype)
        return out

    def heads(
        self, weight: Tensor, num_heads: int, at: Tensor, channels: Tensor, is_query: bool = False
    ) -> Tensor:
        """A projection to heads. A query's added channels are 0 and a key's noise: they add 0."""
        C = self.big.head_dim
        # attention divides scores by sqrt(C)
        scale = math.sqrt(C / self.small.head_dim) if is_query else 1.0
        wide = self.inputs(weight.float() * scale).view(len(at), self.small.head_dim, -1)
        out = self.noise(num_heads * C, wide.shape[-1]).view(num_heads, C, -1)
        if is_query:
            out[at] = 0
        out[at[:, None], channels] = wide
        return out.flatten(0, 1)

    def attention_output(self, weight: Tensor) -> Tensor:
        C = self.small.head_dim
        big_heads = self.big.num_attention_heads
        out = self.zeros(len(weight), big_heads, self.big.head_dim)
        out[:, self.q_heads, :C] = weight.view(len(weight), -1, C).to(self.dtype)
        return self.outputs(out.flatten(1), big_heads * self.big.head_dim)

    def layer(self, small: Tensors, prefix: str) -> Tensors:
        """Every tensor of `small` that a decoder layer has, under its own name."""
        big = self.big
        out: Tensors = {}
        heads, kv_heads = big.num_attention_heads, big.num_key_value_heads
        rules: dict[str, Callable[[Tensor], Tensor]] = {
            "q_proj": lambda w: self.heads(w, heads, self.q_heads, self.rotary, is_query=True),
            "k_proj": lambda w: self.heads(w, kv_heads, self.kv_heads, self.rotary),
            "v_proj": lambda w: self.heads(w, kv_heads, self.kv_heads, self.plain),
            "o_proj": self.attention_output,
            "gate_proj": lambda w: self.inputs(w, big.intermediate_size),
            "up_proj": lambda w: self.inputs(w, big.intermediate_size),
            "down_proj": lambda w: self.outputs(w, big.intermediate_size),
            **dict.fromkeys(NORMS, self.norm),
        }
        for name in (name for name in small if name.startswith(prefix)):
            kind, tensor = name.split(".")[-2:]
            if tensor != "weight" or kind not in rules:
                raise ValueError(f"{name}: a tensor that widening does not know")
            out[name] = rules[kind](small[name])
        return out

    def identity(self, layer: Tensors) -> Tensors:
        """A layer that adds nothing to the stream and costs as much as any: noise, then zeros."""
        out: Tensors = {}
        for name, w in layer.items():
            out[name] = self.noise(*w.shape) if w.ndim == 2 else torch.ones_like(w)
            if name.split(".")[-2] in ("o_proj", "down_proj"):
                out[name].zero_()
        return out

    def embedding(self, weight: Tensor) -> Tensor:
        out = self.zeros(self.big.vocab_size, self.big.hidden_size)
        out[:, : weight.shape[1]] = self.noise(len(out), weight.shape[1])
        out[: len(weight), : weight.shape[1]] = weight.to(self.dtype)
        return out

    def head(self, weight: Tensor, num_rows: int) -> Tensor:
        """Added rows have BELOW times the mean logit, which is negative in a trained head.

        So they are never chosen, and all of them together are hardly ever drawn. (Copies of any one
        row are not that rare: 124,160 of bos take a fifth of the tokens at temperature 1.)
        """
        added = (BELOW * weight.float().mean(0)).to(weight.dtype)
        return self.inputs(torch.cat([weight, added.expand(num_rows - len(weight), -1)]))


def place_layers(small: Shape, big: Shape) -> dict[int, int]:
    """Big layer -> small layer; the others are identities. Streams at boundaries are the same."""
    stretches = zip(
        (0, *small.boundaries), small.boundaries, (0, *big.boundaries), big.boundaries, strict=False
    )
    return {begin + i: low + i for low, high, begin, _ in stretches for i in range(high - low)}


def target_shards(widener: Widener, weights: Tensors) -> Iterator[Tensors]:
    """The target file by file: what lies around the layers, then each layer."""
    big = widener.big
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    yield {
        "model.embed_tokens.weight": widener.embedding(embedding),
        "model.norm.weight": widener.norm(weights["model.norm.weight"]),
        "lm_head.weight": widener.head(head, big.vocab_size),
    }
    placed = place_layers(widener.small, big)
    for i in range(big.num_hidden_layers):
        source = f"model.layers.{placed.get(i, 0)}."
        layer = widener.layer(weights, source)
        layer = layer if i in placed else widener.identity(layer)
        yield {f"model.layers.{i}.{name.removeprefix(source)}": w for name, w in layer.items()}


def draft_tensors(widener: Widener, weights: Tensors) -> Tensors:
    """An EAGLE-3 or EAGLE-1 draft. Where it has a head, added rows stand for the target's."""
    prefix = "midlayer." if "midlayer.mlp.up_proj.weight" in weights else "layers.0."
    fc = weights["fc.weight"]
    columns = fc.shape[1] // widener.small.hidden_size * widener.big.hidden_size
    out = widener.layer(weights, prefix)
    out["fc.weight"] = widener.outputs(widener.inputs(fc), columns)
    if "fc.bias" in weights:
        out["fc.bias"] = widener.zeros(widener.big.hidden_size)
        out["fc.bias"][: len(weights["fc.bias"])] = weights["fc.bias"]
    if "embed_tokens.weight" in weights:
        out["embed_tokens.weight"] = widener.embedding(weights["embed_tokens.weight"])
    if "norm.weight" in weights:
        out["norm.weight"] = widener.norm(weights["norm.weight"])
    if "lm_head.weight" in weights:
        out["lm_head.weight"] = widener.head(
            weights["lm_head.weight"], widener.big.draft_vocab_size
        )
        out |= _draft_ids(widener, weights["d2t"])
    return out


def _draft_ids(widener: Widener, d2t: Tensor) -> Tensors:
    small, big = widener.small, widener.big
    offset = small.vocab_size - small.draft_vocab_size  # draft id -> target id, as d2t stores it
    num_added = big.draft_vocab_size - small.draft_vocab_size
    d2t = torch.cat([d2t, torch.full((num_added,), offset, device=widener.device)])
    t2d = torch.zeros(big.vocab_size, dtype=torch.bool, device=widener.device)
    t2d[d2t + torch.arange(len(d2t), device=widener.device)] = True
    return {"d2t": d2t, "t2d": t2d}
