"""The models every claim is tested on: ``ZOO[name]() -> (model, batch, loss_fn)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Bottleneck

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]


def resnet50() -> nn.Module:
    """Every layer of a ResNet-50, a quarter as wide; ``test_bytes`` has the whole one."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 16
    for width, blocks, stride in ((16, 3, 1), (32, 4, 2), (64, 6, 2), (128, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(inputs, width, 4 * width, stride if i == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.dropout(self.conv(F.relu(self.norm(x))), 0.2, self.training)
        return torch.cat([x, out], 1)


def densenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        *(DenseLayer(16 + 8 * i, 8) for i in range(4)),
        nn.AvgPool2d(2),
        *(DenseLayer(48 + 8 * i, 8) for i in range(3)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(72 * 4, 10),
    )


def mobilenet() -> nn.Module:
    def unit(inputs: int, outputs: int, stride: int, act: nn.Module) -> nn.Module:
        hidden = 4 * inputs
        return nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            act,
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            act,
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        unit(16, 16, 1, nn.ReLU6(inplace=True)),
        unit(16, 24, 2, nn.Hardswish(inplace=True)),
        unit(24, 24, 1, nn.LeakyReLU(0.1, inplace=True)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 16, 5, padding=2),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.MaxPool1d(3, 2, 1),
        nn.Conv1d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AvgPool1d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 16, 3, padding=1),
        nn.InstanceNorm3d(16, affine=True),
        nn.ELU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Mish())
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.out = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.middle(self.pool(skip)))], 1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.rnn = kind(32, 48, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.dropout(self.rnn(self.embed(tokens))[0].mean(1), 0.1, self.training))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens))[:, 0])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.relu(Cube.apply(self.first(x))), 0.1, self.training))


def _classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _images(model: nn.Module, *shape: int, classes: int = 10) -> Case:
    x = torch.randn(*shape)
    model(x)  # lazy layers
    return model, (x, torch.randint(classes, (shape[0],))), _classify


def _tokens(model: nn.Module) -> Case:
    return model, (torch.randint(50, (4, 12)), torch.randint(10, (4,))), _classify


def _channels_last(case: Case) -> Case:
    model, (x, y), loss_fn = case
    return model.to(memory_format=torch.channels_last), (x.to(memory_format=torch.channels_last), y), loss_fn


def _hf_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=60, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    batch = {"input_ids": torch.randint(60, (4, 16)), "labels": torch.randint(2, (4,))}
    return BertForSequenceClassification(config), batch, _hf_loss


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=60, n_embd=64, n_layer=2, n_head=4, n_positions=32, use_cache=False)
    tokens = torch.randint(60, (4, 16))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, _hf_loss


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    tokens = torch.randint(60, (4, 16))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, _hf_loss


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(2, (4,))}
    return ViTForImageClassification(config), batch, _hf_loss


ZOO: dict[str, Callable[[], Case]] = {
    "resnet50": lambda: _images(resnet50(), 2, 3, 64, 64),
    "resnet50-channels-last": lambda: _channels_last(_images(resnet50(), 2, 3, 64, 64)),
    "densenet": lambda: _images(densenet(), 4, 3, 16, 16),
    "mobilenet": lambda: _images(mobilenet(), 4, 3, 32, 32),
    "mobilenet-channels-last": lambda: _channels_last(_images(mobilenet(), 4, 3, 32, 32)),
    "conv1d": lambda: _images(conv1d(), 4, 4, 50),
    "conv3d": lambda: _images(conv3d(), 2, 2, 10, 12, 14),
    "unet": lambda: (UNet(), (torch.randn(2, 3, 20, 20), torch.randint(4, (2, 20, 20))), _classify),
    "lstm": lambda: _tokens(Recurrent(nn.LSTM)),
    "gru": lambda: _tokens(Recurrent(nn.GRU)),
    "encoder": lambda: _tokens(Encoder()),
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "custom-function": lambda: (Custom(), (torch.randn(8, 16), torch.randint(10, (8,))), _classify),
}
