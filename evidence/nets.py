"""The networks that methods are judged on, and one whose memory is counted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.nets import Block


class Residual(nn.Module):
    """Two 3x3 convolutions, each with batch norm, beside the input or its projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def resnet14(
    width: int = 32, classes: int = 10, *, stem: int | None = None, strides: tuple[int, int, int] = (1, 2, 2)
) -> nn.Sequential:
    """A ResNet for 32x32 images: three stages of two blocks, ``width``, twice and four times as wide.

    ``stem`` is the width of the first convolution, ``strides`` those at which the stages begin.
    """
    inputs = width if stem is None else stem
    layers: list[nn.Module] = [nn.Conv2d(3, inputs, 3, 1, 1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU()]
    for factor, stride in zip((1, 2, 4), strides, strict=True):
        layers += [Residual(inputs, factor * width, stride), Residual(factor * width, factor * width, 1)]
        inputs = factor * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Whitening(nn.Module):
    """A convolution with fixed weights and a bias that is learned."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias)


def whitening(images: Tensor, size: int = 2) -> Tensor:
    """Weights that make the patches of these images uncorrelated, each with its opposite: ReLU keeps both halves.

    >>> whitening(torch.randn(8, 3, 8, 8)).shape
    torch.Size([24, 3, 2, 2])
    """
    patches = images.unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    rows = patches.flatten(1).double()
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    weight = (vectors / (values + 0.01).sqrt()).T.flip(0).reshape(-1, *patches.shape[1:]).float()
    return torch.cat([weight, -weight])


def pooled(width: int, first: Tensor, classes: int = 10) -> nn.Sequential:
    """Six convolutions for 32x32 images behind a fixed one with the weights ``first``; max pooling halves maps.

    The form of the networks that train on CIFAR-10 in the least time (Jordan 2024), with ReLU.
    """
    layers: list[nn.Module] = [Whitening(first), nn.ReLU()]
    inputs = len(first)
    for outputs in (width, 4 * width, 4 * width):
        layers += [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.MaxPool2d(2)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(inputs, classes, bias=False))


class TextClassifier(nn.Module):
    """A pre-norm transformer over word numbers with learned positions and a mean over all of them.

    Padding is a word like any other: it has an embedding of its own and is attended to.
    """

    def __init__(
        self, words: int, tokens: int, width: int = 128, heads: int = 4, layers: int = 4, classes: int = 2
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(tokens, width))
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.words(numbers) + self.places[: numbers.shape[1]]
        return self.head(self.norm(self.blocks(x)).mean(1))


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution behind batch norm and ReLU, over everything the block has made so far."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, parts: list[Tensor]) -> Tensor:
        out = self.conv1(self.relu(self.norm1(torch.cat(parts, 1))))
        return self.conv2(self.relu(self.norm2(out)))


class DenseBlock(nn.Module):
    """Dense layers, each fed with the outputs of all before it."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(parts))
        return torch.cat(parts, 1)


def densenet161(classes: int = 1000) -> nn.Sequential:
    """The layers and their order as in torchvision, for 224x224 images."""
    stem = (nn.Conv2d(3, 96, 7, 2, 3, bias=False), nn.BatchNorm2d(96), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return _densenet(stem, 96, 48, (6, 12, 36, 24), classes)


def densenet40(classes: int = 10) -> nn.Sequential:
    """A small one for 32x32 images: three blocks of six layers that add 12 channels each."""
    return _densenet((nn.Conv2d(3, 24, 3, 1, 1, bias=False),), 24, 12, (6, 6, 6), classes)


def _densenet(
    stem: tuple[nn.Module, ...], width: int, growth: int, depths: tuple[int, ...], classes: int
) -> nn.Sequential:
    layers = list(stem)
    for i, depth in enumerate(depths):
        if i:
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False)]
            layers.append(nn.AvgPool2d(2))
            width //= 2
        layers.append(DenseBlock(width, growth, depth))
        width += depth * growth
    layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class GraphNet(nn.Module):
    """Two graph convolutions with dropout before each; ``adjacency`` is sparse and normalized."""

    def __init__(self, adjacency: Tensor, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(torch.sparse.mm(self.adjacency, self.first(F.dropout(x, 0.5, self.training))))
        return torch.sparse.mm(self.adjacency, self.second(F.dropout(x, 0.5, self.training)))
