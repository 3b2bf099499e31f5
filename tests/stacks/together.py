"""What each process of the distributed tests does. Starting processes is slow, so one start serves many checks."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as Ddp

import lowtide
from lowtide.codecs import GroupQuant

BATCH = 40
"""No weight has a side of this length, so shapes tell activations from weights."""

FOUR = GroupQuant(4, 256, "row")
METHODS = {"plain": None, "lossless": "lossless", "four": FOUR}
FROZEN = "2.weight"


def mlp():
    """Whose gradients have noise in the weights alone: rectifiers need a mask, linear layers their inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8))


class Block(nn.Module):
    """Half of a transformer's block, and a layer that every rank of a tensor parallel group holds."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.last_norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.down(self.gelu(self.up(self.norm(x))))
        return x + self.last(self.last_norm(x))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), Block(), Block(), nn.Linear(64, 8))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 32, generator=generator), torch.randint(8, (BATCH,), generator=generator)


def loss_of(model, number):
    x, y = batch(number)
    return nn.functional.cross_entropy(model(x), y)


def full(tensor):
    """All of a distributed tensor."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def named(model, what):
    """Gradients, or weights, by the names of the bare model; all of them on every rank, but for flat parameters."""
    flat = any("flat_param" in name for name, _ in model.named_parameters())
    whole = isinstance(model, Fsdp1) and not flat
    context = Fsdp1.summon_full_params(model, with_grads=True) if whole else nullcontext()
    with context:
        pairs = [(n, p if what == "weights" else p.grad) for n, p in model.named_parameters()]
        names = [n.replace("_fsdp_wrapped_module.", "").removeprefix("module.") for n, _ in pairs]
        return {n: full(t) for n, (_, t) in zip(names, pairs, strict=True) if t is not None}


def bytes_of(report):
    """Plain, stored and held bytes, and the shapes of what is listed."""
    shapes = {"x".join(map(str, site.shape)) for site in report.sites}
    return {
        "plain": report.plain_nbytes,
        "stored": report.stored_nbytes,
        "held": report.held_nbytes,
        "shapes": sorted(shapes),
    }


def train(make, method, *, seed=0, steps=2, same=False, accumulate=False, options=(), attach_inside=False):
    """A few steps of one model: gradients of the first step, weights after the last, bytes."""
    bare, wrap = make()
    handle = None
    if method is not None and attach_inside:
        handle = lowtide.attach(bare, method, seed=seed, min_numel=0, **dict(options))
    model = wrap(bare)
    if method is not None and not attach_inside:
        handle = lowtide.attach(model, method, seed=seed, min_numel=0, **dict(options))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    rank = 0 if same else dist.get_rank()
    found = {}
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                loss_of(model, 100 * step + 50 + rank).backward()
        loss_of(model, 100 * step + rank).backward()
        if step == 0:
            found["gradients"] = named(model, "gradients")
        optimizer.step()
    found["weights"] = named(model, "weights")
    if handle is not None:
        found["bytes"] = bytes_of(handle.report())
        handle.remove()
    return found


def compared(make, **options):
    """The plain run, and what each method makes of it; the last again, and with another seed."""
    found = {name: train(make, method, **options) for name, method in METHODS.items()}
    found["again"] = train(make, FOUR, **options)
    found["other seed"] = train(make, FOUR, seed=1, **options)
    return found


def bounds(number):
    """The largest error that each weight's gradient of :func:`mlp` may have if its input is rounded to four bits.

    A group is one row here. Its step is a fifteenth of its range; low and step are stored in bfloat16, the one rounded
    down, the other up, so both may be off by 2**-7 of themselves. A value errs by less than a step.
    """
    model, found = mlp(), {}

    def look(name):
        def see(module, gradients_in, gradients_out):
            x = module.seen
            low = x.amin(1)
            step = (x.amax(1) - low + 2**-7 * low.abs()) / 15 * (1 + 2**-7)
            found[f"{name}.weight"] = (
                (gradients_out[0].abs() * step[:, None]).sum(0)[:, None].expand(module.weight.shape)
            )

        return see

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, _: setattr(m, "seen", args[0].detach()))
            module.register_full_backward_hook(look(name))
    loss_of(model, number).backward()
    return {name: bound.clone() for name, bound in found.items()}


def bare_bytes():
    """What a session on the bare model reports, without any other process."""
    model = mlp()
    with lowtide.attach(model, "lossless", min_numel=0) as handle:
        loss_of(model, 0).backward()
        return bytes_of(handle.report())


# ---------------------------------------------------------------- ways to train together


def ddp(unused=False, **options):
    def make():
        model = mlp()
        if unused:
            model.append(nn.Identity())
            model[-1].spare = nn.Linear(4, 4)
        return model, lambda bare: Ddp(bare, **options)

    return make


def fsdp1(use_orig_params):
    def wrap(model):
        for i in (0, 2):
            model[i] = Fsdp1(model[i], use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        return Fsdp1(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))

    return lambda: (mlp(), wrap)


def fsdp2(mesh, frozen=False):
    def make():
        model = mlp()
        if frozen:
            model[2].weight.requires_grad_(False)
        for i in (0, 2):
            fully_shard(model[i], mesh=mesh)
        return fully_shard(model, mesh=mesh), lambda bare: bare

    return make


def tensor_parallel(mesh, frozen=False):
    def make():
        model = mlp()
        model[2].weight.requires_grad_(not frozen)
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), lambda bare: bare

    return make


def tensor_parallel_blocks(mesh, kind="local"):
    """``kind``: are activations between layers local tensors, DTensors, or DTensors split by samples at norms?"""

    def make():
        model = blocks()
        for i in (1, 2):
            if kind == "local":
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            elif kind == "dtensor":
                plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            else:
                plan = {
                    "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
                    "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
                    "down": RowwiseParallel(),
                }
                split = PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False
                )
                parallelize_module(model[i], mesh, {"norm": split})
            parallelize_module(model[i], mesh, plan)
        return model, lambda bare: bare

    return make


def replicas(make, method, options=()):
    """Weights and last gradients that every rank of a tensor parallel group holds, after a few steps on one batch."""
    found = train(make, method, steps=3, same=True, options=options)
    return {
        "weights": {n: w for n, w in found["weights"].items() if ".up" not in n and ".down.w" not in n},
        "bytes": found.get("bytes"),
    }


def change_in_place(mesh, method):
    """A DTensor that is changed after an op saved it: what backward raises."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 96)
    model = parallelize_module(nn.Sequential(layer), mesh, {"0": ColwiseParallel(use_local_output=False)})
    context = nullcontext() if method is None else lowtide.compress(model, method, min_numel=0)
    with context:
        h = model(torch.randn(BATCH, 32))
        y = nn.functional.gelu(h)
        h.add_(1)
        del h
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def refused(mesh):
    """What a user sees who asks for what needs the whole model in one process."""
    calls = {
        "budget": lambda model: lowtide.attach(model, budget="1 GiB"),
        "guard": lambda model: lowtide.attach(mlp(), guard=True, tensor_parallel=mesh),
        "check": lambda model: lowtide.check(model, batch(0), lambda m, b: m(b[0]).sum(), "actnn", min_numel=0),
        "adapt": lambda model: lowtide.attach(model, "gact", min_numel=0).adapt(lambda: loss_of(model, 0)),
    }
    found = {}
    for name, call in calls.items():
        for kind, make in (("tp", tensor_parallel(mesh)), ("fsdp2", fsdp2(mesh))):
            model, _ = make()
            try:
                call(model)
                found[f"{name} {kind}"] = ""
            except ValueError as error:
                found[f"{name} {kind}"] = str(error)
    return found


def pipeline(method):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, whole = dist.get_rank(), mlp()
    model = whole[:2] if rank == 0 else whole[2:]
    handle = None if method is None else lowtide.attach(model, method, min_numel=0)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    x, y = batch(0)
    schedule.step(x) if rank == 0 else schedule.step(target=y)
    found = {"gradients": named(model, "gradients")}
    if handle is not None:
        found["bytes"] = bytes_of(handle.report())
        handle.remove()
    return found


# ---------------------------------------------------------------- what a process does


def on_each_of_two(rank):
    warnings.simplefilter("ignore")  # torch's own, of CPUs and of processes
    mesh = init_device_mesh("cpu", (2,))
    found = {"bounds": bounds(rank), "bare": bare_bytes(), "shared bounds": bounds(0)}
    found["ddp"] = compared(ddp())
    found["ddp inside"] = compared(ddp(), attach_inside=True)
    found["ddp static"] = compared(ddp(static_graph=True))
    found["ddp unused"] = compared(ddp(unused=True, find_unused_parameters=True))
    found["ddp no_sync"] = compared(ddp(), accumulate=True)
    found["fsdp1"] = compared(fsdp1(True))
    found["fsdp1 flat"] = compared(fsdp1(False))
    found["fsdp2"] = compared(fsdp2(mesh))
    found["fsdp2 frozen"] = compared(fsdp2(mesh, frozen=True))
    found["tp"] = compared(tensor_parallel(mesh), same=True)
    found["tp frozen"] = compared(tensor_parallel(mesh, frozen=True), same=True)
    for kind in ("local", "dtensor", "sequence"):
        make = tensor_parallel_blocks(mesh, kind)
        for name in ("plain", "lossless"):
            found[f"tp {kind} {name}"] = replicas(make, METHODS[name])
        for method in lowtide.methods() if kind == "local" else ("actnn", "auto"):
            found[f"tp {kind} {method}"] = replicas(make, method)
    explicit = {"tensor_parallel": mesh}
    found["same data"] = {
        "alone": train(lambda: (mlp(), lambda bare: bare), FOUR, same=True)["gradients"],
        "mesh": train(lambda: (mlp(), lambda bare: bare), FOUR, same=True, options=explicit.items())["gradients"],
        "group": train(
            lambda: (mlp(), lambda bare: bare), FOUR, same=True, options=[("tensor_parallel", mesh.get_group())]
        )["gradients"],
    }
    found["changed"] = [change_in_place(mesh, method) for method in (None, "lossless", FOUR)]
    found["refused"] = refused(mesh)
    found["pipeline"] = {name: pipeline(method) for name, method in METHODS.items()}
    return found


def on_each_of_four(rank):
    """Two groups of tensor parallel ranks; FSDP2 shards, or replicates and shards, across them."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    def both(method, samples):
        model, _ = tensor_parallel_blocks(mesh["model"])()
        for i in (1, 2):
            fully_shard(model[i], mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        handle = None if method is None else lowtide.attach(model, method, min_numel=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 100 * step + samples).backward()
            optimizer.step()
        weights = {n: w for n, w in _over_data(model, mesh).items() if ".up" not in n and ".down.w" not in n}
        noise = None if handle is None else handle._session._noise
        return {"weights": weights, "noise": noise, "bytes": None if handle is None else bytes_of(handle.report())}

    data = mesh["data"].get_local_rank()
    found = {str(method): both(method, data) for method in (None, "lossless", "actnn", "auto")}
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found["hsdp"] = compared(fsdp2(hybrid))
    return found


def _over_data(model, mesh):
    """Weights gathered over data parallel ranks alone: what this tensor parallel rank believes them to be."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.device_mesh.ndim == 1:
            found[name] = full(parameter)
        else:
            placements = [Replicate(), *parameter.placements[1:]]
            found[name] = parameter.redistribute(placements=placements).to_local().detach().clone()
    return found
