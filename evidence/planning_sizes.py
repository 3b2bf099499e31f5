"""What fits a card of a given size, computed on tensors without data: no card was there, and nothing ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from benchmarks.nets import Bottleneck, DoubleConv, UNet3d, resnet50
from evidence.planning import SIZES, add, checkpointed, classify, images, read, volumes

_CHUNK = 4096
"""Tokens whose logits are there at once."""


def resnet152(classes: int = 1000) -> nn.Sequential:
    """ResNet-50 with more blocks in its second and third stage."""
    short = list(resnet50(classes))
    deep = [Bottleneck(512, 128, 512, 1) for _ in range(4)], [Bottleneck(1024, 256, 1024, 1) for _ in range(30)]
    # 4 layers of the stem, then 3, 4, 6 and 3 blocks, then the head.
    return nn.Sequential(*short[:11], *deep[0], *short[11:17], *deep[1], *short[17:])


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False, dtype=frozen.weight.dtype)
        self.up = nn.Linear(rank, frozen.out_features, bias=False, dtype=frozen.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def _causal(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Attention that never writes a mask out, as the fused kernels do."""
    del module, mask
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2), None


def llama_8b() -> nn.Module:
    """The sizes of Llama 3 8B in bfloat16, without data, with adapters beside all projections."""
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("causal_without_mask", _causal)
    AttentionMaskInterface.register("causal_without_mask", lambda *args, **kwargs: None)
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1 << 17,
        use_cache=False,
        attn_implementation="causal_without_mask",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.requires_grad_(False)
        for module in list(model.model.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                    setattr(module, name, Adapted(child))
    return model


def thousands(n: int) -> Tensor:
    """One sequence of so many thousand tokens."""
    return torch.zeros(1, 1024 * n, dtype=torch.int64)


def _piece(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), labels, reduction="sum")


def by_pieces(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a language model, a few thousand tokens at a time: all logits at once would hide the rest."""
    language: Any = model
    # The input of the first layer needs a gradient, as PEFT arranges it, or checkpoints would not run backward.
    embedded = language.model.embed_tokens(ids).requires_grad_(True)
    hidden = language.model(inputs_embeds=embedded).last_hidden_state[0]
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden.shape[0], _CHUNK):
        piece = slice(start, start + _CHUNK)
        total = total + checkpoint(_piece, language.lm_head, hidden[piece], ids[0, piece], use_reentrant=False)
    return total / ids.numel()


def _llama_layers() -> tuple[type[nn.Module], ...]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return (LlamaDecoderLayer,)


Case = tuple[
    Callable[[], nn.Module],
    Callable[[int], Any],
    Callable[[nn.Module, Any], Tensor],
    Callable[[], tuple[type[nn.Module], ...]],
    str,
    str,
]

CASES: dict[str, Case] = {
    "ResNet-50, 224 px": (resnet50, images, classify, lambda: (Bottleneck,), "24 GB", "images"),
    "ResNet-152, 224 px": (resnet152, images, classify, lambda: (Bottleneck,), "24 GB", "images"),
    "WRN-50-2, 224 px": (
        functools.partial(resnet50, widen=2), images, classify, lambda: (Bottleneck,), "24 GB", "images",
    ),
    "3-D U-Net, width 32, 64 x 128 x 128": (
        functools.partial(UNet3d, 32),
        functools.partial(volumes, side=128),
        classify,
        lambda: (DoubleConv,),
        "16 GB",
        "volumes",
    ),
    "Llama 3 8B, LoRA, bf16": (llama_8b, thousands, by_pieces, _llama_layers, "80 GB", "thousand tokens"),
}  # fmt: skip


def sizes() -> None:
    """The largest size of each case, three ways."""
    done = {(row["case"], row["way"]) for row in read(SIZES)}
    for name, (build, make, loss, blocks, budget, unit) in CASES.items():
        for way in ("plain", "checkpoint", "plan", "checkpoint and plan"):
            if (name, way) in done:
                continue
            model = build()
            if way.startswith("checkpoint"):
                model = checkpointed(model, blocks())
            method = "plan" if way.endswith("plan") else "plain"
            try:
                found = lowtide.fit(model, make, loss, budget, method=method, run=False, measure=False)
                size, peak = found.size, found.peak
            except lowtide.BudgetError as error:
                size, peak = 0, int(error.least)
            add(SIZES, {"case": name, "way": way, "budget": budget, "size": size, "unit": unit, "predicted_peak": peak})
