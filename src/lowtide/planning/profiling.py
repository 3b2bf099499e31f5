"""One exact step, written down: what is in memory at each moment, who put it there, and what a plan could do."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..codecs import Cast, Codec, LogQuant, TensorMeta, from_config
from ..graph import capture
from ..graph.capture import Site
from ..graph.rules import Need
from ..machine.costs import Call, workspaces
from ..policy.methods import Method
from ..policy.plan import is_page
from ..policy.tuners.base import site_of
from ..policy.tuners.mix import Finding, MixTuner, groups_for
from ..policy.use import Use
from ..report import size
from ..session.opening import MIN_NUMEL, attached, new_session
from ..session.replay import gradients, leaves_of, mapped, undisturbed
from ..verify.check import LossFn, default_loss
from .observing import Called, Calls, ObservedSession, Seen
from .recorder import GRADIENTS, INPUTS, SAVED, WEIGHTS, Recorder

_FORMAT = 4
_GROUP = 256
_SHOWN = 8


class Block(NamedTuple):
    """A storage, and the times between which it is alive."""

    nbytes: int
    born: int
    died: int
    role: str
    """One of weights, inputs, gradients, saved and transient."""
    label: str
    """Where it was saved, or which operator made it."""


class Offer(NamedTuple):
    """A codec for one saved tensor, and the mean square of its error there."""

    codec: Codec
    error: float


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd keeps and that need not stay as it is."""

    sites: tuple[Site, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    need: str
    """What backward needs of its values; "lossless" if a mask, an index or a shape is enough."""
    spatial: bool
    rectified: bool
    sharing: int
    block: int
    """The number of its storage among the profile's blocks."""
    nbytes: int
    """Of the storage; a stretch has its part of them."""
    lossless_nbytes: int
    """Of masks and indices, which are stored in any case."""
    sealed: int
    """The moment from which only the graph needs it."""
    reads: tuple[tuple[int, int], ...]
    """The first and the last moment of each time that backward reads it."""
    bit_reads: tuple[tuple[int, int], ...]
    """Those of them that take the packed bits of a mask, so that nothing is decoded."""
    code_reads: tuple[tuple[int, int], ...]
    """Those of them that take codes as they are, where a kernel can read them."""
    transient: bool
    """Does any other read need memory for the whole tensor, once it is stored?"""
    terms: int = 0
    """If it can be rebuilt: how many terms are summed up."""
    sources: tuple[tuple[Site, float], ...] = ()
    """What it can be rebuilt from, with the gain of their errors."""
    offers: tuple[Offer, ...] = ()
    weight: float = 0.0
    """The cost of a unit of mean squared error; see ``policy.tuners.mix``."""
    whole: float = 0.0
    """The squared noise in the gradient for such a unit, beside the square of the gradient."""

    @property
    def meta(self) -> TensorMeta:
        """Its form."""
        return TensorMeta(self.shape, self.stride, getattr(torch, self.dtype))

    @property
    def use(self) -> Use:
        """As a method sees it."""
        need = Need[self.need.upper()]
        return Use(need, self.meta, self.spatial, self.sites, rectified=self.rectified, sharing=self.sharing)

    @property
    def decodings(self) -> tuple[tuple[int, int], ...]:
        """The reads for which it is decoded, once it is stored."""
        return tuple(read for read in self.reads if read not in self.bit_reads)

    @property
    def has_values(self) -> bool:
        """Does backward read its values, not merely a mask of them or its shape?"""
        return self.need != Need.LOSSLESS.name.lower()


class Part(NamedTuple):
    """A module that was called once in the forward, and that could run again in backward."""

    path: str
    first: int
    """The moment before its first operator."""
    last: int
    """The moment of its last operator."""
    backward: int
    """The first moment at which its backward is at work; -1 if that reads nothing."""
    backward_end: int
    share: float
    """Seconds of its forward, as a part of those of all operators of the step; 0 without data."""
    repeated: bool
    """Is it a block: a member of a Sequential or a ModuleList that has modules inside?"""
    inputs: tuple[int, ...]
    """The numbers of the storages that it was given."""
    outputs: tuple[int, ...]

    def holds(self, path: str) -> bool:
        """Is the module of this path inside it, or itself?"""
        return path == self.path or path.startswith(f"{self.path}.")


@dataclass(frozen=True)
class Profile:
    """One exact training step: memory over time, and all that a plan can decide about. Made by :func:`profile`.

    ``print(profile)`` tells where memory goes; :meth:`save` writes it as JSON, :meth:`load` reads that.
    """

    model: str
    """A digest of the names and shapes of the model's parameters."""
    device: str
    fake: bool
    """Were there only shapes, and no data? Then errors are taken from a formula, and nothing is timed."""
    times: int
    """How many moments the step has."""
    forward_end: int
    blocks: tuple[Block, ...]
    saved: tuple[Saved, ...]
    optimizer_nbytes: int = 0
    workspaces: tuple[tuple[int, int], ...] = ()
    """Moments at which an operator takes memory inside itself, and how much; measured on this machine."""
    step_seconds: float = 0.0
    """Of a plain step, its second; 0 without data."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By module, forward and backward together, as the recorder saw them; recording takes time itself."""
    parts: tuple[Part, ...] = ()
    """Modules that could run again in backward, in the order in which they were called."""
    notes: tuple[str, ...] = ()

    # ------------------------------------------------------------ memory over time

    def level(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes at each moment of the plain step."""
        total = np.zeros(self.times + 2, dtype=np.int64)
        for block in self.blocks:
            total[block.born] += block.nbytes
            total[block.died + 1] -= block.nbytes
        levels: np.ndarray[Any, np.dtype[np.int64]] = np.cumsum(total)[: self.times + 1] + self.optimizer_nbytes
        for at, nbytes in self.workspaces:
            levels[at] += nbytes
        return levels

    @property
    def peak(self) -> int:
        """Bytes at the highest moment: weights, gradients, optimizer and batch included."""
        return int(self.level().max())

    @property
    def rest(self) -> int:
        """Bytes that are there before the step: weights, batch, what the optimizer keeps."""
        return self.of_role(WEIGHTS) + self.of_role(INPUTS) + self.optimizer_nbytes

    def of_role(self, role: str) -> int:
        """Bytes of all storages of a role, whenever they live."""
        return sum(block.nbytes for block in self.blocks if block.role == role)

    @property
    def saved_nbytes(self) -> int:
        """Bytes that autograd keeps for backward."""
        return self.of_role(SAVED)

    def holders(self, at: int | None = None) -> list[tuple[str, str, int]]:
        """Who holds memory at a moment, the peak unless given: role, label and bytes, the largest first."""
        at = int(self.level().argmax()) if at is None else at
        found: dict[tuple[str, str], int] = defaultdict(int)
        for block in self.blocks:
            if block.born <= at <= block.died:
                label = "" if block.role in (WEIGHTS, GRADIENTS, INPUTS) else block.label
                found[block.role, label] += block.nbytes
        if self.optimizer_nbytes:
            found["optimizer", ""] = self.optimizer_nbytes
        inside = sum(nbytes for moment, nbytes in self.workspaces if moment == at)
        if inside:
            found["transient", "inside an operator"] = inside
        return sorted(((role, label, n) for (role, label), n in found.items()), key=lambda row: -row[2])

    # ------------------------------------------------------------ plain data

    def to_data(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["blocks"] = [list(block) for block in self.blocks]
        data["workspaces"] = [list(row) for row in self.workspaces]
        data["seconds"] = dict(self.seconds)
        data["notes"] = list(self.notes)
        data["saved"] = [_saved_to_data(saved) for saved in self.saved]
        data["parts"] = [list(part) for part in self.parts]
        return {"format": _FORMAT, **data}

    def to_json(self) -> str:
        """:meth:`to_data` as text."""
        return json.dumps(self.to_data())

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that :meth:`to_json` wrote; anything else raises a ValueError that says what is wrong."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a profile, which is a JSON document: {error}") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT or "blocks" not in data:
            raise ValueError(f"this is not a profile of format {_FORMAT}; write one with Profile.save")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(data) != names | {"format"}:
            raise ValueError(f"a profile has {', '.join(sorted(names))}; got {', '.join(sorted(data))}")
        try:
            data["blocks"] = tuple(Block(*row) for row in data["blocks"])
            data["workspaces"] = tuple((at, nbytes) for at, nbytes in data["workspaces"])
            data["saved"] = tuple(map(_saved_from_data, data["saved"]))
            data["notes"] = tuple(data["notes"])
            data["parts"] = tuple(Part(*row[:-2], *map(tuple, row[-2:])) for row in data["parts"])
            del data["format"]
            return cls(**data).checked()
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"this profile cannot be read: {type(error).__name__}: {error}") from error

    def checked(self) -> Profile:
        """Itself, if all moments lie within the step and all tensors have a storage; otherwise a ValueError."""
        moments = [self.forward_end, *(at for at, _ in self.workspaces)]
        for block in self.blocks:
            moments += [block.born, block.died]
            if type(block.nbytes) is not int or block.nbytes < 0 or block.born > block.died:
                raise ValueError(f"a storage has bytes, and is born before it dies; got {block}")
        if any(b.born < a.born for a, b in itertools.pairwise(self.blocks)):
            raise ValueError("storages are listed in the order of their birth")
        for saved in self.saved:
            moments += [saved.sealed, *(moment for read in saved.reads for moment in read)]
            if not 0 <= saved.block < len(self.blocks):
                raise ValueError(f"{saved.sites[0]} has no storage")
        for part in self.parts:
            moments += [part.first, part.last, max(0, part.backward), max(0, part.backward_end)]
            if any(not 0 <= number < len(self.blocks) for number in (*part.inputs, *part.outputs)):
                raise ValueError(f"{part.path} was given, or returned, what has no storage")
            if part.first > part.last or (part.backward >= 0 and part.backward <= part.last):
                raise ValueError(f"a module begins before it ends, and its backward comes later; got {part}")
        if type(self.times) is not int or not all(0 <= moment <= self.times for moment in moments):
            raise ValueError(f"all moments lie between 0 and times; times is {self.times!r}")
        return self

    def save(self, path: str | Path, **beside: Any) -> None:
        """Write JSON, or a page if the name ends in .html.

        A page shows what is given ``beside`` too: ``report``, ``plan``, ``check``, ``verification``.
        """
        if is_page(path):
            from ..page.writing import save_page  # which stands above: it joins all that there is to show

            save_page(path, profile=self, **beside)
            return
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def _repr_html_(self) -> str:
        """In a notebook."""
        from ..page.writing import notebook

        return notebook(profile=self)

    def __str__(self) -> str:
        """Where memory goes."""
        levels = self.level()
        at = int(levels.argmax())
        when = "the forward" if at <= self.forward_end else "backward"
        lines = [f"peak {size(int(levels[at]))} in {when}, on {self.device}{', computed without data' * self.fake}"]
        roles: dict[str, int] = defaultdict(int)
        for role, _, nbytes in self.holders(at):
            roles[role] += nbytes
        lines.append("at the peak: " + ", ".join(f"{role} {size(n)}" for role, n in roles.items()))
        may = sum(s.nbytes for s in self.saved)
        lines.append(
            f"autograd keeps {size(self.saved_nbytes)} for backward; {size(may)} of it, {len(self.saved)} tensors, "
            "can be stored in another form"
        )
        lines.append("largest holders at the peak:")
        held = [row for row in self.holders(at) if row[1]]
        lines += [f"  {size(nbytes):>10}  {role:9}  {label}" for role, label, nbytes in held[:_SHOWN]]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _saved_to_data(saved: Saved) -> dict[str, Any]:
    data = {field.name: getattr(saved, field.name) for field in dataclasses.fields(saved)}
    data["sites"] = [list(site) for site in saved.sites]
    data["sources"] = [[list(site), gain] for site, gain in saved.sources]
    data["reads"] = [list(read) for read in saved.reads]
    data["bit_reads"] = [list(read) for read in saved.bit_reads]
    data["code_reads"] = [list(read) for read in saved.code_reads]
    data["offers"] = [[offer.codec.to_config(), offer.error] for offer in saved.offers]
    return data


def _saved_from_data(data: dict[str, Any]) -> Saved:
    return Saved(
        **{
            **data,
            "sites": tuple(map(site_of, data["sites"])),
            "sources": tuple((site_of(site), gain) for site, gain in data["sources"]),
            "reads": tuple((first, last) for first, last in data["reads"]),
            "bit_reads": tuple((first, last) for first, last in data["bit_reads"]),
            "code_reads": tuple((first, last) for first, last in data["code_reads"]),
            "offers": tuple(Offer(from_config(config), error) for config, error in data["offers"]),
            "shape": tuple(data["shape"]),
            "stride": tuple(data["stride"]),
        }
    )


# ---------------------------------------------------------------- making one


def profile(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    fake: bool = False,
    device: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    measure: bool = True,
    min_numel: int = MIN_NUMEL,
) -> Profile:
    """Run one exact step and write down what is in memory at each moment.

    ``batch`` and ``loss_fn`` are those of :func:`check`. Weights, buffers, ``.grad`` and random streams stay as they
    are. With ``fake=True`` nothing is computed and no memory is needed: the model and the batch may be far larger than
    this machine, and may lie on the meta device. The bytes are the same as those of a real step. Errors then come from
    a formula instead of the tensors at hand. ``device`` names the device that a fake profile speaks of; operators are
    chosen as on it if this torch knows it, and as on the CPU otherwise, which a note says.

    The ``optimizer``, if it is given, adds what it keeps for each parameter. With ``measure`` the memory that large
    operators take inside themselves is measured in a process of its own, once for each machine (CPU only).

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> profile = lowtide.profile(model, torch.randn(128, 64), lambda m, x: m(x).square().mean(), fake=True)
    >>> profile.saved_nbytes  # the input of the GELU, that of the second layer, and what is squared
    262656
    """
    loss_fn = _checked(model, batch, loss_fn)
    if fake or _is_fake(model):
        return without_data(model, batch, loss_fn, device, optimizer, measure=measure, min_numel=min_numel)
    if device is not None:
        raise ValueError(f"device goes with fake=True; a real step runs where the model is. Got device={device!r}")
    notes: list[str] = []
    with undisturbed(model):
        recorder, session, end, calls = _recorded(model, batch, loss_fn, min_numel)
    findings, method = _measured(model, batch, loss_fn, min_numel)
    place = next(model.parameters()).device
    began, busy = time.perf_counter(), time.process_time()
    gradients(model, lambda: loss_fn(model, batch))
    took = time.perf_counter() - began
    if place.type == "cpu":  # other processes may have had the cores meanwhile
        took = min(took, time.process_time() - busy)
    return Profile(
        model=digest(model),
        device=str(place),
        fake=False,
        times=recorder.time,
        forward_end=end,
        blocks=_blocks(recorder),
        saved=tuple(with_findings(_by_formula(session.seen, recorder), findings, method)),
        optimizer_nbytes=_optimizer_nbytes(optimizer, model, notes),
        workspaces=_inside(recorder.calls) if measure and place.type == "cpu" else (),
        step_seconds=took,
        seconds=dict(recorder.seconds),
        parts=_parts(model, recorder, session, calls),
        notes=tuple(notes),
    )


def without_data(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    device: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    measure: bool = False,
    min_numel: int = MIN_NUMEL,
) -> Profile:
    """The profile of a step of which only the shapes are computed, on copies that have no data.

    A function in place of the batch is called where new tensors have no data.
    """
    notes: list[str] = []
    with capture.fakes() as (copy_module, copy_tensor):
        copied = _settled_on(copy_module(model), device, notes)
        place = next(copied.parameters()).device
        made = batch() if callable(batch) else batch
        moved = mapped(made, lambda x: _like(copy_tensor(x), place) if isinstance(x, Tensor) else x)
        try:
            recorder, session, end, calls = _recorded(copied, moved, loss_fn or default_loss(moved), min_numel)
        except capture.NEEDS_DATA as error:
            first = str(error).splitlines()[0]
            raise ValueError(
                f"this model's step depends on values, so it cannot run without data: {first}. Profile a real step"
            ) from error
        kept = _optimizer_nbytes(optimizer, copied, notes)
    return Profile(
        model=digest(model),
        device=str(place) if device is None else device,
        fake=True,
        times=recorder.time,
        forward_end=end,
        blocks=_blocks(recorder),
        saved=tuple(_by_formula(session.seen, recorder)),
        optimizer_nbytes=kept,
        workspaces=_inside(recorder.calls) if measure and place.type == "cpu" and device in (None, "cpu") else (),
        parts=tuple(part._replace(share=0.0) for part in _parts(copied, recorder, session, calls)),
        notes=tuple(notes),
    )


def _blocks(recorder: Recorder) -> tuple[Block, ...]:
    return tuple(Block(b.nbytes, b.born, b.died, b.role, b.label) for b in recorder.blocks)


def digest(model: nn.Module) -> str:
    """The same for models whose parameters have the same names and shapes."""
    text = "\n".join(f"{name} {tuple(p.shape)}" for name, p in model.named_parameters())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _checked(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> LossFn:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters, so there is no training memory to profile")
    if attached(model):
        raise RuntimeError("this model is attached already, so its step is not a plain one; remove() that handle first")
    return default_loss(batch) if loss_fn is None else loss_fn


def _is_fake(model: nn.Module) -> bool:
    return any(not capture.has_data(parameter) for parameter in model.parameters())


def _settled_on(model: nn.Module, device: str | None, notes: list[str]) -> nn.Module:
    """The fake model on the device that it is asked for, as far as this torch can pretend to have it."""
    place = None if device is None else _device_type(device)
    if place is not None and not _can_pretend(place):
        notes.append(f"this torch does not know {place}: operators are those of the CPU")
        place = "cpu"
    made: dict[int, Tensor] = {}
    for module in model.modules():  # one by one, because ``to`` refuses tensors without data; shared ones stay shared
        for name, tensor in _tensors_of(module):
            where = place or ("cpu" if tensor.device.type == "meta" else tensor.device)
            if torch.device(where) == tensor.device:
                continue
            if id(tensor) not in made:
                like = torch.empty_like(tensor, device=where)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
            setattr(module, name, made[id(tensor)])
    return model


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Its own parameters and buffers by every name that they have."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _device_type(device: str) -> str:
    """The kind of device, without its number: a number makes torch look for the device itself."""
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a name such as cpu, cuda or xpu; got {device!r}") from error


def _can_pretend(device: str) -> bool:
    try:
        torch.empty(1, device="meta").to(device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


def _like(tensor: Tensor, place: torch.device) -> Tensor:
    return tensor if tensor.device == place else torch.empty_like(tensor, device=place)


def _recorded(
    model: nn.Module, batch: Any, loss_fn: LossFn, min_numel: int
) -> tuple[Recorder, ObservedSession, int, list[Called]]:
    """One step; when its forward ended, and the calls of modules in it."""
    session: ObservedSession | None = None
    recorder = Recorder(lambda: "" if session is None else session.where())
    session = ObservedSession(model, recorder, min_numel)
    recorder.know(model.parameters(), WEIGHTS)
    recorder.know(model.buffers(), WEIGHTS)
    recorder.know((leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)), INPUTS)
    calls = Calls(model, recorder)
    with torch.enable_grad(), recorder:
        with session, calls:
            loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(f"loss_fn must return a loss of one value that depends on parameters; got {loss!r}")
        end = recorder.time
        torch.autograd.backward(loss)
    for parameter in model.parameters():
        block = None if parameter.grad is None else recorder.block_of(parameter.grad.untyped_storage())
        if block is not None:
            block.role = GRADIENTS
            block.label = ""
    session.finish()
    recorder.finish()
    return recorder, session, end, calls.done


def _parts(model: nn.Module, recorder: Recorder, session: ObservedSession, calls: Sequence[Called]) -> tuple[Part, ...]:
    """Modules that were called once and that can run again."""
    place = {id(block): i for i, block in enumerate(recorder.blocks)}
    blocks = set(_repeated(model, ""))
    times: dict[str, int] = defaultdict(int)
    for call in calls:
        times[call.path] += 1
    found = []
    for call in sorted(calls, key=lambda call: (call.first, -call.last)):
        if times[call.path] > 1 or not call.is_pure:
            continue
        inside = f"{call.path}."
        spans = [span for path, span in session.at_work.items() if path == call.path or path.startswith(inside)]
        found.append(
            Part(
                path=call.path,
                first=call.first,
                last=call.last,
                backward=min((first for first, _ in spans), default=-1),
                backward_end=min(recorder.time, max((last for _, last in spans), default=-1)),
                share=call.elapsed / recorder.elapsed if recorder.elapsed else 0.0,
                repeated=call.path in blocks,
                inputs=tuple(place[id(live)] for live in call.inputs if id(live) in place),
                outputs=tuple(place[id(live)] for live in call.outputs if id(live) in place),
            )
        )
    return tuple(found)


def _repeated(module: nn.Module, path: str) -> list[str]:
    """Members of a Sequential or ModuleList that have modules inside; of containers in containers the innermost."""
    found = []
    for name, child in module.named_children():
        inner = _repeated(child, f"{path}.{name}" if path else name)
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict)) or type(child) is nn.Sequential
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and any(child.children()) and not (is_list and inner):
            found.append(f"{path}.{name}" if path else name)
        else:
            found += inner
    return found


def _inside(calls: Iterable[tuple[int, Call]]) -> tuple[tuple[int, int], ...]:
    calls = list(calls)
    measured = workspaces(list(dict.fromkeys(call for _, call in calls)))
    return tuple((at, measured[call]) for at, call in calls if measured.get(call))


def _optimizer_nbytes(optimizer: torch.optim.Optimizer | None, model: nn.Module, notes: list[str]) -> int:
    """What the optimizer keeps; if it has not stepped yet, what another of its kind keeps after a step without data."""
    if optimizer is None:
        return 0
    kept = _state_nbytes(optimizer)
    if kept:
        return kept
    try:
        with capture.fakes():
            parameters = [
                torch.empty_like(p, device="cpu", requires_grad=True) for p in model.parameters() if p.requires_grad
            ]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            known = inspect.signature(type(optimizer)).parameters
            settings = {name: value for name, value in optimizer.defaults.items() if name in known}
            other = type(optimizer)(parameters, **settings)
            other.step()
            return _state_nbytes(other)
    except Exception as error:  # an optimizer of the user's own may need anything
        notes.append(f"what {type(optimizer).__name__} keeps is not known before its first step: {error}")
        return 0


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(value.numel() * value.element_size() for value in values)


# ---------------------------------------------------------------- what noise costs


def _by_formula(seen: Sequence[Seen], recorder: Recorder) -> list[Saved]:
    """What the step showed, with errors by formula."""
    place = {id(block): i for i, block in enumerate(recorder.blocks)}
    values: dict[int, int] = defaultdict(int)
    for each in seen:
        values[id(each.block)] += each.meta.numel
    found = []
    for each in seen:
        use, block = each.use, each.block
        share = block.nbytes * each.meta.numel // max(1, values[id(block)])
        need = Need.LOSSLESS if use is None else use.need
        saved = Saved(
            sites=each.sites,
            shape=tuple(each.meta.shape),
            stride=tuple(each.meta.stride),
            dtype=str(each.meta.dtype).removeprefix("torch."),
            need=need.name.lower(),
            spatial=use is not None and use.spatial,
            rectified=use is not None and use.rectified,
            sharing=0 if use is None else use.sharing,
            block=place[id(block)],
            nbytes=share,
            lossless_nbytes=each.lossless_nbytes,
            sealed=each.sealed,
            reads=tuple((first, last) for first, last in each.reads),
            bit_reads=tuple((first, last) for first, last in each.bit_reads),
            code_reads=tuple((first, last) for first, last in each.code_reads),
            transient=each.transient,
            terms=each.terms,
        )
        if use is not None:
            sources = tuple((site, 1.0) for site in use.sources)
            saved = dataclasses.replace(saved, sources=sources, offers=_formula(use), weight=_usual_weight(use))
        found.append(saved)
    return found


_HAZARD = {Need.LINEAR: 1.0, Need.BATCH: 1.0, Need.PROPAGATE: 4.0, Need.EXPONENT: 64.0, Need.LOGARITHM: 64.0}
"""How much worse than in the input of a linear layer noise is: rough means of docs/design.md, "Bits by need"."""


def _formula(use: Use) -> tuple[Offer, ...]:
    """Codecs with their errors for values that are spread normally with a mean square of 1.

    The range of 256 such values is about 5.7 of their deviations, and a dithered value errs uniformly over a step.
    """
    if use.need >= Need.LOGARITHM:
        # Relative errors. Where the log-probabilities of a group differ by a factor of 8, 8 bits have steps of 1 %.
        half, codes = Offer(Cast("bfloat16"), 2.0**-18), Offer(LogQuant(group=_GROUP), 2.0**-17)
        return (codes, half) if use.need is Need.LOGARITHM else (half,)
    spread = 5.7**2 / 12 / (2 if use.rectified else 1)
    offers = [
        Offer(groups_for(use, bits, _GROUP), spread / (2**bits - 1) ** 2) for bits in range(max(2, use.least_bits), 9)
    ]
    return (*offers, Offer(Cast("bfloat16"), 2.0**-18))


def _usual_weight(use: Use) -> float:
    return _HAZARD.get(use.need, 64.0)


def _measured(model: nn.Module, batch: Any, loss_fn: LossFn, min_numel: int) -> tuple[dict[Site, Finding], Method]:
    """What a measuring step of ``auto`` finds of each tensor: errors, and what noise does to gradients."""
    session = new_session(model, "auto", {}, min_numel=min_numel)
    session.gradients(lambda: loss_fn(model, batch), 1)
    tuner = session.policy.tuner
    assert isinstance(tuner, MixTuner)
    return {finding.sites[0]: finding for finding in tuner.findings()}, session.method


def with_findings(saved: Sequence[Saved], findings: Mapping[Site, Finding], method: Method) -> list[Saved]:
    """Saved tensors with errors that were measured, in place of those by formula."""
    found = []
    for each in saved:
        finding = findings.get(each.sites[0])
        if each.has_values and finding is None:  # no gradient came by, or it is not up for choice: as the method has it
            codec = method.choose(each.use).codec
            known = () if codec is None else (Offer(codec, 0.0),)
            if each.need == Need.LOGARITHM.name.lower():  # as auto's tuner has it, which does not measure this either
                known = (Offer(LogQuant(group=_GROUP), 0.0), *known)
            each = dataclasses.replace(each, offers=known, weight=0.0, sources=())
        elif each.has_values and finding is not None:
            offers = tuple(Offer(o.codec, o.error) for o in finding.options if o.codec is not None)
            sources = tuple(finding.sources)
            each = dataclasses.replace(each, offers=offers, weight=finding.weight, whole=finding.whole, sources=sources)
        found.append(each)
    return found
