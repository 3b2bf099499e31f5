"""Networks whose shapes and order of ops are those of well-known ones; small inputs keep them quick.

Which tensors can be rebuilt from others depends on the order of ops alone, so nothing here is trained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def _head(channels: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


# ---------------------------------------------------------------- images


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside the input or its projection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(*_unit(inputs, width, 1), nn.ReLU()),
            *(*_unit(width, width, 3, stride), nn.ReLU()),
            *_unit(width, 4 * width, 1),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_unit(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.shortcut(x))


def resnet50(classes: int = 100) -> nn.Sequential:
    """Four stages of 3, 4, 6 and 3 bottlenecks."""
    layers: list[nn.Module] = [*_unit(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, *_head(inputs, classes))


def _before(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    """A convolution behind batch norm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, 1, kernel // 2, bias=False)
    return [nn.BatchNorm2d(inputs), nn.ReLU(), conv]


class Dense(nn.Module):
    """The input, with the maps of a narrow bottleneck beside it."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_before(inputs, 4 * growth, 1), *_before(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(x)], 1)


def densenet121(classes: int = 100, growth: int = 32) -> nn.Sequential:
    """Four blocks of 6, 12, 24 and 16 dense layers, halved in between."""
    layers: list[nn.Module] = [*_unit(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate((6, 12, 24, 16)):
        if stage:
            layers += [*_before(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(blocks):
            layers.append(Dense(channels, growth))
            channels += growth
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), *_head(channels, classes))


def vgg16(classes: int = 100) -> nn.Sequential:
    """Thirteen 3x3 convolutions with batch norm; one linear layer in place of three."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [*_unit(inputs, width, 3), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_head(inputs, classes))


# ---------------------------------------------------------------- tokens


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class BertBlock(nn.Module):
    """Attention and a GELU MLP, each added to its input before a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_split(f(x), self.heads) for f in (self.q, self.k, self.v))
        x = self.norm1(x + F.dropout(self.out(_joined(F.scaled_dot_product_attention(q, k, v))), 0.1))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))


class RmsNorm(nn.Module):
    """As language models write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """Attention with rotary places and a gated MLP, each behind a norm and beside its input."""

    def __init__(self, width: int, heads: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        head = width // heads
        speed = 10000.0 ** (-torch.arange(0, head, 2) / head)
        angle = (torch.arange(tokens)[:, None] * speed).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turned(self, x: Tensor) -> Tensor:
        """Pairs of values rotated by an angle that grows with the place."""
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (_split(f(h), self.heads) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.out(_joined(mixed))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Words(nn.Module):
    """Blocks between an embedding and a word for each token, (tokens of the batch, words)."""

    def __init__(self, words: int, width: int, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks, self.last = nn.Embedding(words, width), nn.Sequential(*blocks), last
        self.head = nn.Linear(width, words)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.embedding(numbers)))).flatten(0, 1)


def bert(words: int = 100, layers: int = 4, width: int = 768) -> Words:
    """Blocks of BERT-base."""
    return Words(words, width, [BertBlock(width, width // 64) for _ in range(layers)], nn.Identity())


def llama(words: int = 100, layers: int = 4, width: int = 512, tokens: int = 128) -> Words:
    """Blocks of Llama, narrow."""
    blocks: list[nn.Module] = [LlamaBlock(width, width // 64, 11 * width // 4, tokens) for _ in range(layers)]
    return Words(words, width, blocks, RmsNorm(width))
