"""What is measured: networks with their batch, the modes a step can run in, the settings of the allocator.

A *subject* is a setup function: ``SUBJECTS[name](batch) -> Subject``. A *mode* is a way to run its step. The allocator
is "default" or "tuned".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.machine.measure import Child
from lowtide.malloc import start_environment
from lowtide.tools import demo
from nets import BasicBlock, Bottleneck, DoubleConv, Gpt, UNet3d, resnet18, resnet20, resnet50


@dataclass
class Subject:
    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    blocks: list[nn.Module]
    session: lowtide.Session | None = None
    """Opened again in every step: what an adaptive method learns stays."""


def _images(model: nn.Module, x: Tensor, classes: int, kind: type[nn.Module]) -> Subject:
    target = torch.randint(classes, (x.shape[0], *x.shape[2:]) if kind is DoubleConv else (x.shape[0],))
    # The batch is made anew from a seed in each step, as a data loader would: nobody else holds it.
    return Subject(
        model,
        lambda m: F.cross_entropy(m(x.clone()), target),
        [m for m in model.modules() if type(m) is kind],
    )


def _tokens(model: nn.Module, batch: dict[str, Tensor], blocks: Any) -> Subject:
    return Subject(model, lambda m: m(**batch).loss, list(blocks))


def _bert(batch: int) -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(vocab_size=8192))
    tokens = {"input_ids": torch.randint(8192, (batch, 128)), "labels": torch.randint(2, (batch,))}
    return _tokens(model, tokens, model.bert.encoder.layer)


def _gpt2(batch: int) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8192, use_cache=False))
    tokens = torch.randint(8192, (batch, 256))
    return _tokens(model, {"input_ids": tokens, "labels": tokens}, model.transformer.h)


def _gpt(batch: int) -> Subject:
    model = Gpt(depth=4)
    tokens = torch.randint(2048, (batch, 257))
    return Subject(
        model,
        lambda m: F.cross_entropy(m(tokens[:, :-1].contiguous()).flatten(0, 1), tokens[:, 1:].flatten()),
        list(model.blocks),
    )


def _mlp(depth: int, width: int, batch: int) -> Subject:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    x = torch.randn(batch, width)
    return Subject(model, lambda m: m(x.clone()).square().mean(), [])


SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "resnet50": lambda n: _images(resnet50(), torch.randn(n, 3, 224, 224), 1000, Bottleneck),
    "resnet18": lambda n: _images(resnet18(), torch.randn(n, 3, 112, 112), 1000, BasicBlock),
    "demo": lambda n: _images(demo.network(), torch.randn(n, 1, 32, 32), 10, demo.Block),
    "resnet20": lambda n: _images(resnet20(), torch.randn(n, 3, 32, 32), 10, BasicBlock),
    "resnet8": lambda n: _images(resnet20(blocks=1), torch.randn(n, 3, 32, 32), 10, BasicBlock),
    "bert": _bert,
    "gpt2": _gpt2,
    "gpt": _gpt,
    "unet3d": lambda n: _images(UNet3d(), torch.randn(n, 1, 32, 64, 64), 3, DoubleConv),
    "tiny-mlp": lambda n: _mlp(40, 32, n),
    "tiny-cnn": lambda n: _images(resnet20(), torch.randn(n, 3, 4, 4), 10, BasicBlock),
    **{f"depth-{d}": functools.partial(_mlp, d, 512) for d in (10, 25, 50, 100, 200)},
}

BATCH = {"resnet50": 16, "demo": 64, "resnet20": 128, "bert": 8, "gpt2": 2, "unet3d": 2, "tiny-mlp": 8, "tiny-cnn": 2}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lossless": ("lossless", {}),
    "division": ("division", {}),
    "actnn": ("actnn", {}),
    "actnn-fixed": ("actnn", {"level": "L2", "bits": 2}),
    "auto": ("auto", {}),
    "tinyscript": ("tinyscript", {}),
    "gact": ("gact", {}),
    "pool": ("pool", {}),
    "cast-bfloat16": ("cast", {}),
}


def checkpoint_blocks(subject: Subject) -> None:
    for block in subject.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def step(subject: Subject, mode: str, precision: str) -> None:
    """One forward and backward. ``mode`` is plain, checkpoint or a method; ``precision`` bfloat16 means autocast."""
    subject.model.zero_grad(set_to_none=True)
    if mode in METHODS and subject.session is None:
        method, options = METHODS[mode]
        subject.session = lowtide.compress(subject.model, method, **options)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with subject.session or contextlib.nullcontext(), autocast:
        loss = subject.loss(subject.model)
    loss.backward()


def child(function: str, argument: dict[str, Any], allocator: str) -> Child:
    """A new process that starts as the allocator needs it; the function has to call :func:`tune` first."""
    variables = start_environment() if allocator == "tuned" else {}
    return Child(function, argument | {"allocator": allocator}, exact_rss=False, variables=variables)


def in_child(function: str, argument: dict[str, Any], allocator: str) -> dict[str, Any]:
    """Call it in such a process, and return what it returns."""
    with child(function, argument, allocator) as process:
        while process.resume() is not None:
            pass
    assert process.result is not None
    return process.result


def tune(argument: dict[str, Any]) -> None:
    """Set up this process as :func:`in_child` was told."""
    if argument["allocator"] == "tuned" and not lowtide.tune_cpu_allocator():
        raise RuntimeError("this system's allocator cannot be tuned")
