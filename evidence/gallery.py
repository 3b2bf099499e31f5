"""The pages of docs/gallery.md: a real step of four networks, planned for half of its peak, and checked.

``python -m evidence.gallery`` makes all pages and their pictures; names of networks make only those, and ``--pictures``
takes pictures of pages that are there. Pictures need Chromium. Sizes are small, so that a few minutes on two cores do;
nothing on these pages is a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.page.writing import read, write

REPO = Path(__file__).parent.parent
sys.path[:0] = [str(REPO / "benchmarks"), str(REPO / "tests")]

from nets import UNet3d, resnet50  # noqa: E402

FOLDER = REPO / "docs" / "gallery"
PART = 0.5  # of the plain peak


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def named(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _resnet() -> tuple[nn.Module, Any, Any]:
    return resnet50(), (torch.randn(8, 3, 128, 128), torch.randint(1000, (8,))), classify


def _unet() -> tuple[nn.Module, Any, Any]:
    return UNet3d(), (torch.randn(2, 1, 32, 32, 32), torch.randint(3, (2, 32, 32, 32))), classify


def _vit() -> tuple[nn.Module, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    # The sizes of ViT-S/16.
    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000)
    return (
        ViTForImageClassification(config),
        {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(1000, (8,))},
        named,
    )


def _gpt2() -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(8192, (4, 256))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8192, use_cache=False))
    return model, {"input_ids": tokens, "labels": tokens}, named


NETS: dict[str, tuple[str, Callable[[], tuple[nn.Module, Any, Any]]]] = {
    "resnet50": ("ResNet-50, 8 images of 128 px", _resnet),
    "vit": ("ViT-S/16, 8 images of 224 px", _vit),
    "gpt2": ("GPT-2, 4 x 256 tokens", _gpt2),
    "unet3d": ("3-D U-Net, 2 volumes of 32 px", _unet),
}


def make(name: str) -> None:
    title, build = NETS[name]
    torch.manual_seed(0)
    model, batch, loss = build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    found = lowtide.profile(model, batch, loss, optimizer=optimizer)
    found = dataclasses.replace(found, step_seconds=0.0, seconds={})
    try:
        made = lowtide.plan(found, PART * found.peak)
    except lowtide.BudgetError as error:
        made = lowtide.plan(found, 1.05 * error.least)
    result = lowtide.check(model, batch, loss, made, seconds=20)
    made.save(FOLDER / f"{name}.html", check=result, title=f"{title}: {made.limit}")
    print(f"{name}: {made.summary()}\n{result.verdict}", flush=True)


def pictures(name: str) -> None:
    from browser import browser

    page = FOLDER / f"{name}.html"
    write(read(page), page)  # as this version writes it
    with browser() as tab:
        for kind, width, dark in (("light", 1200, False), ("dark", 1200, True), ("phone", 360, False)):
            tab.look(width, 900, dark=dark)
            tab.open(page)
            end = tab.run("document.getElementById('tensors').offsetTop" if kind != "phone" else "1500")
            tab.look(width, int(end), dark=dark)
            tab.settle()
            tab.screenshot(FOLDER / f"{name}-{kind}.png", full=False)


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
