"""What a command is to look at: a function of the user's own, or a model that a library knows by name."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..graph import capture
from ..session.replay import NotDivisible, mapped, samples_in
from ..verify.check import LossFn, default_loss

DTYPES = ("float32", "bfloat16", "autocast")
"""Weights and batch in one of two types, or float32 weights with bfloat16 autocast around the loss."""

SAMPLES = 8
"""Samples of a batch, if nobody says how many."""

_FORMS = "FILE.py:FUNCTION, MODULE:FUNCTION, hf:CONFIG, timm:NAME or torchvision:NAME"
_TOKENS = 512
_SIDE = 224

_T = TypeVar("_T")


class TargetError(ValueError):
    """A target that cannot be built; the message says why, and what to do."""


class Target(NamedTuple):
    """A model with all that one training step needs; made by :func:`resolve`."""

    model: nn.Module
    make_batch: Callable[[int], Any]
    """Makes a batch of so many samples."""
    loss_fn: LossFn
    batch: int
    """The samples that were asked for. A batch that cannot be divided counts as one sample."""
    name: str
    note: str = ""
    """What a reader has to know about how the model was built."""


def resolve(
    text: str,
    *,
    batch: int | None = None,
    size: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    fake: bool = True,
) -> Target:
    """Build what ``text`` names. Whatever is wrong with it raises a :class:`TargetError` of one line.

    ``FILE.py:FUNCTION`` and ``MODULE:FUNCTION`` name a function that returns (model, batch) or (model, batch, loss_fn).
    It is called without arguments, or with a number of samples if it takes one. ``hf:CONFIG`` is a model of
    transformers with random weights: the path of a config.json, a model type such as ``gpt2``, or a name on the hub.
    ``timm:NAME`` and ``torchvision:NAME`` are image classifiers with random weights.

    ``batch`` is the number of samples (8, or those of the function's own batch), ``size`` the side of images, ``seq``
    the number of tokens (512, or the most that the model takes). Without a ``dtype`` a function's model stays as it is,
    and others are float32. With ``fake`` neither model nor batch has data, so they need no memory.

    >>> target = resolve("hf:gpt2", batch=2, seq=64)  # 124 million weights, none of them in memory
    >>> target.make_batch(target.batch)["input_ids"].shape
    torch.Size([2, 64])
    """
    if dtype is not None and dtype not in DTYPES:
        raise TargetError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    kind, colon, name = text.partition(":")
    if not kind or not colon or not name:
        raise TargetError(f"expected {_FORMS}; got {text!r}")
    named = {"hf": _hf, "timm": _timm, "torchvision": _torchvision}.get(kind)
    if named is not None:
        return _of_library(text, named(name, size, seq), batch or SAMPLES, dtype or "float32", fake)
    if size is not None or seq is not None:
        raise TargetError("size and seq go with hf:, timm: and torchvision: models; a function makes its own batch")
    return _of_user(text, batch, dtype, fake)


# ---------------------------------------------------------------- functions of the user's own


def function_of(text: str) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names."""
    place, colon, name = text.rpartition(":")
    if not place or not colon or not name:
        raise TargetError(f"expected FILE.py:FUNCTION or MODULE:FUNCTION, such as train:build; got {text!r}")
    try:
        module = _of_file(place) if place.endswith(".py") else _of_name(place)
    except ModuleNotFoundError as error:
        raise TargetError(f"cannot import {place!r}: {error}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise TargetError(f"{place} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def parts_of(given: Any) -> tuple[nn.Module, Any, LossFn]:
    """The model, the batch and the loss that a function of the user's returned."""
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
        kind = type(given).__name__
        if isinstance(given, tuple):
            fits = len(given) in (2, 3)
            kind = f"a tuple that begins with {type(given[0]).__name__}" if fits else f"a tuple of {len(given)}"
        raise TargetError(f"the function must return (model, batch) or (model, batch, loss_fn); got {kind}")
    model, batch, loss_fn = given if len(given) == 3 else (*given, None)
    if loss_fn is None:
        try:
            loss_fn = default_loss(batch)
        except TypeError as error:
            raise TargetError(str(error)) from error
    return model, batch, loss_fn


def _of_user(text: str, batch: int | None, dtype: str | None, fake: bool) -> Target:
    function = function_of(text)
    usual = _usual_number(function)
    number = batch or usual

    def call(n: int) -> tuple[nn.Module, Any, LossFn]:
        return parts_of(function() if usual is None else function(n))

    (model, own, loss_fn), note = _built(lambda: call(number or SAMPLES), fake)
    own = _cast(own, dtype)
    if usual is None:
        make, number = _resized(own, text), batch or _samples(own)
    else:
        first = number

        def make(n: int) -> Any:
            return own if n == first else _cast(_built(lambda: call(n), fake)[0][1], dtype)

    assert number is not None
    return Target(_finished(model, dtype, fake), make, _loss(loss_fn, dtype), number, text, note)


def _of_name(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m has it; the installed command does not
    return importlib.import_module(name)


def _of_file(text: str) -> ModuleType:
    """The file as a module that child processes can import too, unless another module has its name."""
    if not Path(text).is_file():
        raise TargetError(f"there is no file {text!r}")
    path = Path(text).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as python has it for the file that it runs
    importlib.invalidate_caches()
    with contextlib.suppress(ValueError):  # of a module that does not know where it came from
        spec = importlib.util.find_spec(path.stem) if "." not in path.stem else None
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
            return importlib.import_module(path.stem)
    name = f"lowtide_target_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    with contextlib.suppress(ModuleNotFoundError):  # other processes do not find a module of that name
        importlib.import_module("cloudpickle").register_pickle_by_value(module)
    return module


def _usual_number(function: Callable[..., Any]) -> int | None:
    """How many samples the function makes if nobody says; None if it does not take a number."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of something that is not written in Python
        return None
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise TargetError(f"the function must take nothing, or one number of samples; it takes {names}")
    if required:
        return SAMPLES
    first = next((p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)
    return first.default if first is not None and type(first.default) is int and first.default > 0 else None


def _samples(batch: Any) -> int:
    try:
        return samples_in(batch)
    except NotDivisible:
        return 1


def _resized(batch: Any, name: str) -> Callable[[int], Any]:
    """What makes a batch of any size from the samples of one, over and over again if they are too few."""

    def make(n: int) -> Any:
        if n == _samples(batch):
            return batch
        try:
            count = samples_in(batch)
        except NotDivisible as error:
            raise TargetError(f"{error}; let {name} take a number n, and return a batch of n samples") from error

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            # A copy: a slice would keep all samples in memory.
            return leaf.index_select(0, torch.arange(n, device=leaf.device).remainder(count))

        return mapped(batch, take)

    return make


# ---------------------------------------------------------------- models of libraries


class _Named(NamedTuple):
    """How to build a model that a library knows, and what it learns from."""

    build: Callable[[], nn.Module]
    batches: Callable[[nn.Module], Callable[[int], Any]]
    """For the model that was built: what makes a batch on torch's default device."""
    loss_fn: LossFn


def _of_library(text: str, named: _Named, batch: int, dtype: str, fake: bool) -> Target:
    model, note = _built(named.build, fake)
    make_one = named.batches(model)

    def make(n: int) -> Any:
        with torch.device("meta") if fake else contextlib.nullcontext():
            return _cast(make_one(n), dtype)

    return Target(_finished(model, dtype, fake).train(), make, _loss(named.loss_fn, dtype), batch, text, note)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise TargetError(f"{package} is not installed: pip install {package} ({error})") from error


def _unknown(library: str, name: str, names: list[str]) -> TargetError:
    near = difflib.get_close_matches(name, names)
    return TargetError(f"{library} has no model {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")


_HEADS = {
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}
"""Tasks for which a batch can be made, the first that fits first; and where transformers lists their models."""


def _hf(name: str, size: int | None, seq: int | None) -> _Named:
    transformers = _package("transformers")
    config = _hf_config(transformers, name)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # keys and values of the past are for generating, as transformers' Trainer knows
    head = _hf_head(transformers, config)
    if head is None:
        raise TargetError(f"hf:{name} has no head for text or image classes; give FILE.py:FUNCTION instead")
    make = _hf_images(config, size) if head == "AutoModelForImageClassification" else _hf_tokens(config, seq, head)
    if size is not None and head != "AutoModelForImageClassification":
        raise TargetError(f"hf:{name} reads tokens: give seq instead of size")
    if seq is not None and head == "AutoModelForImageClassification":
        raise TargetError(f"hf:{name} reads images: give size instead of seq")
    return _Named(lambda: getattr(transformers, head).from_config(config), lambda model: make, text_loss)


def _hf_config(transformers: Any, name: str) -> Any:
    if not Path(name).exists():
        if name in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.for_model(name)
        if name.endswith(".json"):
            raise TargetError(f"there is no file {name!r}")
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # of the network, of the hub, of the file: each has exceptions of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if Path(name).exists():
            raise TargetError(f"{name} is not the configuration of a model: {reason}") from error
        near = difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING))
        hint = f" such as {near[0]}" if near else " such as gpt2"
        raise TargetError(
            f"{name!r} is neither a file nor a model type{hint}, and the hub does not give it: {reason}"
        ) from error


def _hf_head(transformers: Any, config: Any) -> str | None:
    """The task that the configuration names, or else the usual one of its type."""
    fits = {}
    for head, mapping in _HEADS.items():
        known = getattr(transformers, mapping, {})
        if type(config) in known:
            found = known[type(config)]
            fits[head] = {kind.__name__ for kind in (found if isinstance(found, tuple) else (found,))}
    named = set(getattr(config, "architectures", None) or ())
    for head, kinds in fits.items():
        if kinds & named:
            return head
    if getattr(config, "is_encoder_decoder", False):
        return "AutoModelForSeq2SeqLM" if "AutoModelForSeq2SeqLM" in fits else None
    if "AutoModelForMaskedLM" in fits and len(fits) > 1:
        fits.pop("AutoModelForCausalLM", None)  # it reads both ways, such as BERT
    return next(iter(fits), None)


def _hf_tokens(config: Any, seq: int | None, head: str) -> Callable[[int], dict[str, Tensor]]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    if seq is not None and isinstance(most, int) and 0 < most < seq:
        raise TargetError(f"this model takes {most} tokens at most; got seq={seq}")
    length = seq or (min(_TOKENS, most) if isinstance(most, int) and most > 0 else _TOKENS)
    classes = config.num_labels if head == "AutoModelForSequenceClassification" else None

    def make(n: int) -> dict[str, Tensor]:
        tokens = torch.randint(text.vocab_size, (n, length))
        labels = tokens.clone() if classes is None else torch.randint(classes, (n,))
        made = {"input_ids": tokens, "labels": labels}
        return {**made, "decoder_input_ids": tokens.clone()} if head == "AutoModelForSeq2SeqLM" else made

    return make


def _hf_images(config: Any, size: int | None) -> Callable[[int], dict[str, Tensor]]:
    own = getattr(config, "image_size", None) or _SIDE
    high, wide = (size, size) if size else own if isinstance(own, (list, tuple)) else (own, own)
    channels = getattr(config, "num_channels", 3)

    def make(n: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(n, channels, high, wide), "labels": torch.randint(config.num_labels, (n,))}

    return make


def _timm(name: str, size: int | None, seq: int | None) -> _Named:
    timm = _package("timm")
    if seq is not None:
        raise TargetError(f"timm:{name} reads images: give size instead of seq")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())

    def batches(model: nn.Module) -> Callable[[int], Any]:
        config: Any = getattr(model, "default_cfg", None) or {}
        channels, high, wide = config.get("input_size", (3, _SIDE, _SIDE))
        classes: Any = getattr(model, "num_classes", 1000)
        return _images((channels, size or high, size or wide), classes)

    return _Named(_with_side(timm.create_model, (name,), "img_size", size), batches, image_loss)


def _torchvision(name: str, size: int | None, seq: int | None) -> _Named:
    models = _package("torchvision.models")
    if seq is not None:
        raise TargetError(f"torchvision:{name} reads images: give size instead of seq")
    names = models.list_models(module=models)  # those that tell classes of images, and no others
    if name not in names:
        raise _unknown("torchvision.models", name, names)
    side = size or _SIDE
    return _Named(
        _with_side(models.get_model, (name,), "image_size", size),
        lambda model: _images((3, side, side), 1000),
        image_loss,
    )


def _with_side(make: Callable[..., nn.Module], given: tuple[Any, ...], word: str, size: int | None) -> Any:
    """Vision transformers have to know the size of images; other models do not take it."""

    def build() -> nn.Module:
        if size is not None:
            with contextlib.suppress(TypeError):
                return make(*given, **{word: size})
        return make(*given)

    return build


def _images(shape: tuple[int, int, int], classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(classes, (n,)))


# ---------------------------------------------------------------- losses, which child processes can import


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the model's scores for images."""
    images, classes = batch
    scores = model(images)
    if not isinstance(scores, Tensor):
        kind = type(scores).__name__
        raise TypeError(f"the model returns {kind} and not one tensor of scores; give FILE.py:FUNCTION with a loss")
    return functional.cross_entropy(scores, classes)


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of transformers has itself."""
    with _one_text_a_row(model):
        return default_loss(batch)(model, batch)


@contextlib.contextmanager
def _one_text_a_row(model: nn.Module) -> Iterator[None]:
    """Tell transformers what it reads from positions otherwise: that no row holds several texts.

    Without data it cannot read them, and makes an attention mask for each row that no real step has.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    usual = getattr(masks, "find_packed_sequence_indices", None)
    if usual is None or all(map(capture.has_data, model.parameters())):
        yield
        return
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = usual


@dataclass(frozen=True)
class Autocast:
    """A loss under bfloat16 autocast."""

    loss_fn: LossFn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, on whatever device the model is."""
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            return self.loss_fn(model, batch)


def _loss(loss_fn: LossFn, dtype: str | None) -> LossFn:
    return Autocast(loss_fn) if dtype == "autocast" else loss_fn


# ---------------------------------------------------------------- types, and models without memory


def _cast(batch: Any, dtype: str | None) -> Any:
    """The batch with floats of the type; autocast begins with float32."""
    if dtype is None:
        return batch
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    return mapped(batch, lambda x: x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x)


def _built(build: Callable[[], _T], fake: bool) -> tuple[_T, str]:
    """What ``build`` makes, with ``fake`` on the meta device if that can be; a note if it cannot."""
    if not fake:
        return build(), ""
    said = io.StringIO()
    try:
        with torch.device("meta"), contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # loaded weights are not needed
            made = build()
    except TargetError:
        print(said.getvalue(), end="")
        raise
    except Exception as error:  # whoever reads a value, or another device, has an exception of its own
        first = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
    else:
        print(said.getvalue(), end="")
        return made, ""
    return build(), f"the weights are in memory, because the model cannot be built without data ({reason})"


def _finished(model: nn.Module, dtype: str | None, fake: bool) -> nn.Module:
    """The model in its type and, with ``fake``, off the meta device, which no operator of a step knows."""
    if dtype is not None:
        model = model.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    return _off_meta(model) if fake else model


def _off_meta(model: nn.Module) -> nn.Module:
    """Replace what lies on the meta device by CPU tensors without data. What was tied stays tied."""
    new: dict[int, Tensor] = {}
    old = []  # alive, so that no number is given twice

    def other(tensor: Tensor) -> Tensor:
        if id(tensor) not in new:
            made: Tensor = torch.empty_like(tensor, device="cpu", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            new[id(tensor)] = made
            old.append(tensor)
        return new[id(tensor)]

    with capture.fakes():
        for module in model.modules():
            named: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False, remove_duplicate=False)]
            named += module.named_buffers(recurse=False, remove_duplicate=False)
            named += [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
            for name, tensor in named:
                if tensor.is_meta:
                    setattr(module, name, other(tensor))
    return model
