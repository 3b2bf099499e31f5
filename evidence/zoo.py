"""Networks of public libraries with fresh weights and small batches, on which every method has to be safe.

Sizes are the smallest at which a network still has all its parts: the fewer values share the statistics of a batch
norm, the more its backward makes of an error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
WORDS = 500


class Case(NamedTuple):
    """A network, and the loss of one fixed batch as a function of a small change of its input."""

    model: nn.Module
    loss: Callable[[float], Tensor]


class Subject(NamedTuple):
    """How to make a case, and where the network comes from."""

    title: str
    library: str
    batch: str
    build: Callable[[], Case]


def vision() -> Any:
    """The package torchvision, also where its compiled part does not load.

    Wheels for CUDA do not load beside a torch for CPUs, and then the import fails for want of the schema of one
    operator, which no network here calls.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torchvision is missing; install the extra 'zoo'")
    if not hasattr(torch.ops.torchvision, "nms"):
        try:
            for path in Path(found.origin).parent.glob("_C*.so"):
                torch.ops.load_library(path)
        except OSError:
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float limit) -> Tensor")
    import torchvision
    import torchvision.models.detection
    import torchvision.models.segmentation

    return torchvision.models


def _noise(x: Tensor, change: float) -> Tensor:
    """``x`` and a random change of this size, the same in each call."""
    return x if not change else x + change * torch.randn(x.shape, generator=torch.Generator().manual_seed(7))


def _classifier(model: nn.Module, count: int, size: int) -> Case:
    x, y = torch.randn(count, 3, size, size), torch.randint(CLASSES, (count,))
    return Case(model, lambda change: F.cross_entropy(model(_noise(x, change)), y))


def _timm(name: str, count: int, size: int, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        vision()
        import timm

        return _classifier(timm.create_model(name, num_classes=CLASSES, **options), count, size)

    return build


def _vision(name: str, count: int, size: int) -> Callable[[], Case]:
    return lambda: _classifier(getattr(vision(), name)(num_classes=CLASSES), count, size)


def _segmenter(name: str, count: int, size: int) -> Callable[[], Case]:
    def build() -> Case:
        model = getattr(vision().segmentation, name)(weights=None, weights_backbone=None, num_classes=CLASSES)
        x, y = torch.randn(count, 3, size, size), torch.randint(CLASSES, (count, size, size))
        return Case(model, lambda change: F.cross_entropy(model(_noise(x, change))["out"], y))

    return build


def _detector(name: str, count: int, size: int) -> Callable[[], Case]:
    def build() -> Case:
        model = getattr(vision().detection, name)(
            weights=None, weights_backbone=None, num_classes=CLASSES, min_size=size, max_size=size
        )
        x = torch.rand(count, 3, size, size)
        corner = torch.rand(count, 3, 2) * size / 2
        boxes = torch.cat([corner, corner + size / 4 + torch.rand(count, 3, 2) * size / 4], 2)
        targets = [{"boxes": b, "labels": torch.randint(1, CLASSES, (3,))} for b in boxes]
        return Case(model, lambda change: sum(model(list(_noise(x, change)), targets).values()))

    return build


def _text(model: str, config: str, **sizes: Any) -> Callable[[], Case]:
    def build() -> Case:
        vision()  # transformers looks for it
        import transformers

        network = getattr(transformers, model)(getattr(transformers, config)(vocab_size=WORDS, **sizes))
        tokens = torch.randint(WORDS, (4, 64))
        table = network.get_input_embeddings()
        return Case(network, lambda change: network(inputs_embeds=_noise(table(tokens), change), labels=tokens).loss)

    return build


def _vgg() -> Case:
    """With one linear layer behind its maps; the usual three hold a hundred million weights and no norm."""
    model = vision().vgg11_bn(num_classes=CLASSES)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, CLASSES)
    return _classifier(model, 4, 64)


_SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 512}
_GPT2 = {"n_layer": 4, "n_head": 4, "n_embd": 128, "bos_token_id": 0, "eos_token_id": 0}
SUBJECTS: Mapping[str, Subject] = {
    name: Subject(title, library, batch, build)
    for name, title, library, batch, build in (
        ("resnet50", "ResNet-50", "torchvision", "4 of 64 px", _vision("resnet50", 4, 64)),
        ("vgg11", "VGG-11, batch norm", "torchvision", "4 of 64 px", _vgg),
        ("densenet121", "DenseNet-121", "torchvision", "4 of 64 px", _vision("densenet121", 4, 64)),
        ("regnet", "RegNetY-400MF", "torchvision", "4 of 64 px", _vision("regnet_y_400mf", 4, 64)),
        ("efficientnet", "EfficientNet-B0", "torchvision", "4 of 64 px", _vision("efficientnet_b0", 4, 64)),
        ("mnasnet", "MNASNet", "torchvision", "4 of 64 px", _vision("mnasnet1_0", 4, 64)),
        ("shufflenet", "ShuffleNetV2", "torchvision", "4 of 64 px", _vision("shufflenet_v2_x1_0", 4, 64)),
        ("mobilenetv3", "MobileNetV3 small", "torchvision", "4 of 64 px", _vision("mobilenet_v3_small", 4, 64)),
        ("mobilenetv4", "MobileNetV4 small", "timm", "4 of 96 px", _timm("mobilenetv4_conv_small", 4, 96)),
        ("ghostnet", "GhostNet", "timm", "4 of 64 px", _timm("ghostnet_100", 4, 64)),
        ("hrnet", "HRNet-W18 small", "timm", "2 of 64 px", _timm("hrnet_w18_small", 2, 64)),
        ("repvgg", "RepVGG-A0", "timm", "4 of 64 px", _timm("repvgg_a0", 4, 64)),
        ("fastvit", "FastViT-T8", "timm", "4 of 64 px", _timm("fastvit_t8", 4, 64)),
        ("resnetv2", "ResNetV2-50, group norm", "timm", "2 of 64 px", _timm("resnetv2_50d_gn", 2, 64)),
        ("convnext", "ConvNeXt-Atto", "timm", "4 of 64 px", _timm("convnext_atto", 4, 64)),
        ("vit", "ViT-Ti/16", "timm", "4 of 96 px", _timm("vit_tiny_patch16_224", 4, 96, img_size=96)),
        ("swin", "Swin-T", "torchvision", "2 of 64 px", _vision("swin_t", 2, 64)),
        ("deeplabv3", "DeepLabV3-R50", "torchvision", "2 of 64 px", _segmenter("deeplabv3_resnet50", 2, 64)),
        ("retinanet", "RetinaNet-R50", "torchvision", "2 of 96 px", _detector("retinanet_resnet50_fpn", 2, 96)),
        ("fcos", "FCOS-R50", "torchvision", "2 of 96 px", _detector("fcos_resnet50_fpn", 2, 96)),
        ("bert", "BERT, 4 layers", "transformers", "4 of 64 tokens", _text("BertForMaskedLM", "BertConfig", **_SMALL)),
        ("gpt2", "GPT-2, 4 layers", "transformers", "4 of 64 tokens", _text("GPT2LMHeadModel", "GPT2Config", **_GPT2)),
        (
            "llama",
            "Llama, 4 layers",
            "transformers",
            "4 of 64 tokens",
            _text("LlamaForCausalLM", "LlamaConfig", **_SMALL),
        ),
    )
}
