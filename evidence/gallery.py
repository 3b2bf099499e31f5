"""The pages of docs/gallery.md: a step of four networks, planned for a part of its peak.

``python -m evidence.gallery`` makes all pages and their pictures; names of networks make only those, and ``--pictures``
takes pictures of pages that are there. Pictures need Chromium. Two steps are run and checked, on small batches; the
sizes of the other two are computed without data. No page shows a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.page.writing import read, write
from lowtide.planning.profiling import without_data

REPO = Path(__file__).parent.parent
sys.path[:0] = [str(REPO / "benchmarks"), str(REPO / "tests")]

from nets import UNet3d, resnet50  # noqa: E402

FOLDER = REPO / "docs" / "gallery"


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def named(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


class Net(NamedTuple):
    title: str
    build: Callable[[], tuple[nn.Module, Any, Any]]
    part: float
    """Of the plain peak."""
    real: bool
    """Is the step run, and are its gradients checked? Else its sizes are computed without data."""


def _resnet() -> tuple[nn.Module, Any, Any]:
    return resnet50(), lambda: (torch.empty(64, 3, 224, 224), torch.zeros(64, dtype=torch.int64)), classify


def _unet() -> tuple[nn.Module, Any, Any]:
    return UNet3d(), (torch.randn(2, 1, 32, 32, 32), torch.randint(3, (2, 32, 32, 32))), classify


def _vit() -> tuple[nn.Module, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, num_labels=100)
    batch = {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(100, (8,))}
    return ViTForImageClassification(config), batch, named


def _gpt2() -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    def batch() -> dict[str, Tensor]:
        tokens = torch.zeros(8, 1024, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model, batch, named


NETS = {
    "resnet50": Net("ResNet-50, 64 images of 224 px", _resnet, 0.35, real=False),
    "vit": Net("ViT-Ti/16, 8 images of 224 px", _vit, 0.5, real=True),
    "gpt2": Net("GPT-2, 8 x 1024 tokens", _gpt2, 0.5, real=False),
    "unet3d": Net("3-D U-Net, 2 volumes of 32 px", _unet, 0.53, real=True),
}


def make(name: str) -> None:
    net = NETS[name]
    torch.manual_seed(0)
    model, batch, loss = net.build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    if net.real:
        found = lowtide.profile(model, batch, loss, optimizer=optimizer)
        found = dataclasses.replace(found, step_seconds=0.0, seconds={})
    else:
        found = without_data(model, batch, loss, optimizer=optimizer)
    made = lowtide.plan(found, net.part * found.peak)
    result = lowtide.check(model, batch, loss, made, seconds=20) if net.real else None
    made.save(FOLDER / f"{name}.html", check=result, title=net.title)
    print(f"{name}: {made.summary()}\n{result.verdict if result else ''}", flush=True)


SHOTS = {
    "": (1200, False, "header", "#timeline .panels"),
    "-dark": (1200, True, "header", "#timeline .panels"),
    "-phone": (360, False, "header", "#timeline .panels"),
    "-tensors": (1200, False, "#tensors", "#tensors"),
    "-gradients": (1200, False, "#frontier", "#fidelity"),
}
"""By the end of a picture's name: width of the window, is it dark, and which part of the page it shows."""
EXTRA = {"resnet50": ("-dark", "-phone"), "vit": ("-tensors", "-gradients")}


def pictures(name: str) -> None:
    from PIL import Image

    from browser import browser

    page = FOLDER / f"{name}.html"
    write(read(page), page)  # as this version writes it
    with browser() as tab:
        for end in ("", *EXTRA.get(name, ())):
            width, dark, first, last = SHOTS[end]
            tab.look(width, 900, dark=dark)
            tab.open(page)
            path = FOLDER / f"{name}{end}.png"
            tab.screenshot(path, first, last)
            with Image.open(path) as image:
                image.convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *NETS], help="all unless given")
    parser.add_argument("--pictures", action="store_true", help="only take pictures of the pages that are there")
    parser.add_argument("--pages", action="store_true", help="only make the pages")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in arguments.names or NETS:
        if not arguments.pictures:
            make(name)
        if not arguments.pages:
            pictures(name)


if __name__ == "__main__":
    main()
