"""Every private name of torch's compiler that is used: the hooks of its partitioner, and its symbols."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.graph import GraphLowering
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ..policy.methods import Method
from .packing import Graphs, Rewriting, decide


class Partitioner(CustomPartitionerFn):
    """Torch's own partition of a step into forward and backward, with what passes between them packed."""

    def __init__(self, method: Method, min_numel: int, is_fused: bool) -> None:
        self.method = method
        self.min_numel = min_numel
        self.is_fused = is_fused
        """Does a compiler join simple ops, and choose the order in memory of what is inside a graph?"""

    def uuid(self) -> Any:
        """What a cached graph depends on beside the model: our sources, the method, the least size."""
        return _sources(), str(self.method), self.min_numel, self.is_fused

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition, then pack."""
        static = set(options.get("static_lifetime_input_indices") or ())
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        inputs = forward.graph.find_nodes(op="placeholder")
        graphs = Graphs(
            forward.graph,
            backward.graph,
            options["num_fwd_outputs"],
            [i in static for i in range(len(inputs))],
            number_of,
            self.is_fused,
            self.is_fused and GraphLowering.decide_layout_opt(forward, is_inference=False),
        )
        decide(graphs, self.method, self.min_numel)
        Rewriting(graphs).run()
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
        return forward, backward


@lru_cache(maxsize=1)
def _sources() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def number_of(graph: fx.Graph, symbol: torch.SymInt) -> Any:
    """The number that a symbol stands for, as a node that computes it from the graph's inputs."""
    expression = symbol.node.expr
    if expression.is_number:
        return int(expression)
    known: dict[Any, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            if value.node.expr == expression:
                return node
            known[value.node.expr] = fx.Proxy(node)
    found = sympy_interp(PythonReferenceAnalysis, known, expression)
    found.node.meta["val"] = symbol
    return found.node


def compiled(
    model: nn.Module, partitioner: Partitioner, backend: str, mode: str | None, options: Mapping[str, Any]
) -> Any:
    """``torch.compile`` with a partitioner."""
    if backend == "inductor":
        chosen = dict(options.get("options") or {})
        if mode is not None:
            chosen = {**list_mode_options(mode), **chosen}
        rest = {name: value for name, value in options.items() if name != "options"}
        return torch.compile(model, options={**chosen, "custom_partitioner_fn": partitioner}, **rest)
    return torch.compile(model, backend=_eager_backend(partitioner), **options)


def _eager_backend(partitioner: Partitioner) -> Callable[..., Any]:
    return aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True
    )
