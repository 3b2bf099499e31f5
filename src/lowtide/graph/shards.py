"""Tensors of which each process holds a part, and processes that hold the same; torch's private names for both.

Two kinds of tensors are met. A ``DTensor`` is a part in this process, with a description of the whole: the part is what
takes memory, so the part is packed. What a collective has not finished yet is a wrapper around the memory it will fill;
an op that has read it has waited for it.

Processes that work on the same samples (tensor parallel) each compute the gradients of parameters that they all hold,
and expect equal ones. So they must round alike, and an adaptive method must decide alike. Processes that work on
different samples (data parallel) must round independently, or averaging over them would not average the noise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_ADVICE = "give tensor_parallel= the mesh or the process group of the ranks that work on the same samples"


class Part(NamedTuple):
    """The part of a tensor that this process holds."""

    local: Tensor
    whole: Callable[[Tensor], Any]
    """Takes such a part back to what autograd expects; raises if the tensor was changed in place since."""


class Team(NamedTuple):
    """The ranks that work on the same samples as this one, by the first of them, and how to reach them."""

    rank: int
    groups: tuple[Any, ...]
    """Process groups; one for each dimension of their mesh."""

    def agreed(self, decision: Any) -> Any:
        """What the first rank says, on every rank; all of them have to call this."""
        dist = torch.distributed
        for group in self.groups:
            said = [decision]
            dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
            decision = said[0]
        return decision


def _kind(module: str, name: str) -> Any:
    """A class of torch, if anybody has imported its module; without that there are no values of it."""
    return getattr(sys.modules.get(module), name, None)


def _dtensor() -> Any:
    return _kind("torch.distributed.tensor", "DTensor")


def _waited(tensor: Any) -> Any:
    """The memory that a collective fills, once it has."""
    unfinished = _kind("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return tensor.trigger_wait() if unfinished is not None and type(tensor) is unfinished else tensor


def local_of(tensor: Any) -> Any:
    """The part of a tensor that this process holds; the tensor itself if that is all of it."""
    dtensor = _dtensor()
    if dtensor is not None and type(tensor) is dtensor:
        tensor = tensor._local_tensor
    return _waited(tensor)


def part_of(tensor: Any, changed: Callable[[tuple[int, ...]], Exception]) -> Part | None:
    """The part of a saved tensor that takes memory here, if the tensor itself is only a wrapper around it.

    The part has no version of its own: changes in place move that of the wrapper. ``changed`` makes the error that is
    raised if it has moved.
    """
    local = local_of(tensor)
    if local is tensor:
        return None
    local = local.detach()
    dtensor = _dtensor()
    if type(tensor) is not dtensor:
        return Part(local, lambda values: values)
    spec, version = tensor._spec, tensor._version
    counter = tensor.detach()
    counter._local_tensor = torch.empty(0)  # it keeps the version in sight, and no memory

    def whole(values: Tensor) -> Any:
        if counter._version != version:
            raise changed(tuple(counter.shape))
        return dtensor(values, spec, requires_grad=False)

    return Part(local, whole)


def team_of(model: nn.Module) -> Team | None:
    """The ranks that work on the same samples, as the model's distributed parameters tell; None if there are no others.

    FSDP2 distributes parameters over data-parallel ranks, and knows which dimensions of a mesh are its own. All other
    dimensions are taken to hold parts of one computation.
    """
    dtensor, dist = _dtensor(), torch.distributed
    if dtensor is None or not dist.is_available() or not dist.is_initialized():
        return None
    modules = list(model.modules())
    meshes = _meshes_below_fsdp(modules)
    managed = set(meshes)
    found = [mesh for mesh in meshes.values() if mesh is not None]
    for module in modules:
        parameters: dict[str, Any] = module._parameters
        for parameter in parameters.values():
            if type(parameter) is dtensor and id(parameter) not in managed:
                found.append(parameter.device_mesh)
    unlike: dict[tuple[int, ...], Any] = {tuple(sorted(mesh.mesh.flatten().tolist())): mesh for mesh in found}
    if not unlike:
        return None
    ranks = max(unlike, key=len)
    if any(not set(others) <= set(ranks) for others in unlike):
        raise RuntimeError(f"parameters are distributed over {sorted(unlike)}, which do not nest; {_ADVICE}")
    return team(unlike[ranks])


def team(ranks: Any) -> Team | None:
    """The ranks of a ``DeviceMesh`` or a process group; None if it is this one alone."""
    dist = torch.distributed
    mesh_kind = _kind("torch.distributed.device_mesh", "DeviceMesh")
    if mesh_kind is not None and isinstance(ranks, mesh_kind):
        numbers = ranks.mesh.flatten().tolist()
        groups = tuple(ranks.get_group(dim) for dim in range(ranks.ndim) if ranks.size(dim) > 1)
    elif dist.is_available() and isinstance(ranks, dist.ProcessGroup):
        numbers, groups = dist.get_process_group_ranks(ranks), (ranks,)
    else:
        raise TypeError(
            f"tensor_parallel must be a DeviceMesh or a process group of the ranks that work on the same samples; "
            f"got {ranks!r:.80}"
        )
    if len(numbers) > 1 and dist.get_rank() not in numbers:
        raise ValueError(f"tensor_parallel must hold this rank, {dist.get_rank()}; it holds {sorted(numbers)}")
    return Team(min(numbers), groups) if len(numbers) > 1 else None


def is_gathered(model: nn.Module) -> bool:
    """Does FSDP shard parameters of the model, and gather others in the forward in their place?"""
    kinds = [_kind("torch.distributed.fsdp", name) for name in ("FullyShardedDataParallel", "FSDPModule")]
    sharding = tuple(kind for kind in kinds if kind is not None)
    return bool(sharding) and any(isinstance(module, sharding) for module in model.modules())


def is_spread(model: nn.Module) -> bool:
    """Does each process hold a part of the model's parameters only, so that no process can copy the model?"""
    dtensor = _dtensor()
    parted = dtensor is not None and any(type(parameter) is dtensor for parameter in model.parameters())
    return parted or is_gathered(model)


def own_rank() -> int:
    """This process among all that train together."""
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _meshes_below_fsdp(modules: list[nn.Module]) -> dict[int, Any]:
    """For each parameter that FSDP2 shards, by identity: the mesh it was distributed over before, if it was."""
    fsdp = _kind("torch.distributed.fsdp", "FSDPModule")
    found: dict[int, Any] = {}
    for module in modules:
        if fsdp is None or not isinstance(module, fsdp):
            continue
        try:
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                for each in () if group is None else group.fsdp_params:
                    found[id(each.sharded_param)] = _mesh_below(each) if each.is_dtensor else None
        except AttributeError as error:
            raise RuntimeError(
                f"FSDP2 of torch {torch.__version__} does not tell which ranks it shards over ({error}); {_ADVICE}"
            ) from error
    return found


def _mesh_below(managed: Any) -> Any:
    spec = getattr(managed, "_unsharded_dtensor_spec", None) or managed._tp_spec
    own = getattr(managed.mesh_info, "dp_mesh_dims", None)
    if own is None:
        return spec.mesh
    others = tuple(name for name in spec.mesh.mesh_dim_names if name not in (*own.shard_names, *own.replicate_names))
    return spec.mesh[others] if others else None
