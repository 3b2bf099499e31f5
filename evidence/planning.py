"""Plans under budgets, measured: peak, time and gradient error beside what was predicted, and beside other ways.

    python -m evidence.planning steps            peaks and errors of real steps, each mode in processes of its own
    python -m evidence.planning times            times of these rows, by turns with plain steps; for a quiet machine
    python -m evidence.planning blocks           the smallest peaks with and without checkpoints, computed without data
    python -m evidence.planning fit              the largest batch for 2 GiB, each verified by a real step
    python -m evidence.planning products         what plans would gain by products made again, computed
    python -m evidence.planning sizes            what fits cards of the papers' sizes, computed without data
    python -m evidence.planning page             docs/planning.md and its figure from the rows

Rows are added to ``evidence/results/planning.csv``, ``blocks.csv``, ``fits.csv``, ``products.csv`` and ``sizes.csv``,
each as soon as it is there; what is there already is not run again. ``--subjects`` and ``--rows`` choose some of them,
and ``--again`` measures those anew. ``make evidence-plan`` runs all of it.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from benchmarks.nets import Bottleneck, DoubleConv, UNet3d, resnet50
from benchmarks.turns import take_turns
from evidence.fidelity import RESULTS, environment
from lowtide.machine.measure import Child, Emit
from lowtide.planning.checkpoints import candidates
from lowtide.planning.checkpoints import checkpointed as with_checkpoints
from lowtide.planning.planner import Problem, budget_for, nbytes_of
from lowtide.planning.solvers import path
from lowtide.planning.verifying import _stepper, verify
from lowtide.session.opening import new_session

STEPS, BLOCKS, FITS, SIZES, PRODUCTS = (
    RESULTS / f"{name}.csv" for name in ("planning", "blocks", "fits", "sizes", "products")
)
MODES = ("plain", "division", "actnn", "auto", "checkpoint", "save_on_cpu")
PLANS = {
    "plan": ("compress", "rebuild"),
    "plan by error alone": ("compress", "rebuild"),
    "plan with checkpoints": ("compress", "rebuild", "checkpoint"),
    "exact plan": ("checkpoint",),
}
"""What plans may do, by the name of their rows."""
TIME_WEIGHTS = {"plan by error alone": 0.0}
PARTS = {
    "plan": ("auto", 0.8, 0.0, "actnn", 0.6, 0.4, "division"),
    "plan by error alone": ("auto",),
    "plan with checkpoints": (0.8, 0.6, 0.0),
    "exact plan": ("checkpoint", "save_on_cpu"),
}
"""Budgets as parts of the plain peak, or such that the predicted peak may be the measured one of another way; 0 stands
for the smallest possible."""
WAYS = ("plain", "checkpoint", "plan", "plan with checkpoints")
_TIMES = {"seconds": "median_s", "time": "ratio", "time_least": "ratio_low", "time_most": "ratio_high"}
"""The median step, that over plain's of the same turn, and the interval of that ratio, by their names in turns."""
_TURNS = 9
"""With so many the second smallest and the second largest ratio hold the median in 96 of 100 cases."""
_PIECE, _HIGH = 1 << 20, 128
"""Of a product that is computed in float32: values of the second factor, and rows of the first, at a time."""
ERROR = 0.1
"""The error that a plan may have where the smallest peak is asked for."""


# ---------------------------------------------------------------- what is run


class Checkpointed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def checkpointed(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> nn.Module:
    """The model with every block of these kinds checkpointed, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kinds):
                setattr(module, name, Checkpointed(child))
    return model


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def named(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


@functools.cache
def _with_products() -> torch.library.Library | None:
    """Let products of bfloat16 matrices be computed in float32, piece by piece, on processors that cannot do better.

    Where oneDNN has no bfloat16, torch takes a hundred times as long for some of them as in float32, so that a step is
    all product, and no row would tell anything else. The pieces take less than 10 MiB. What operators take inside
    themselves is not measured with this loss, because that is done where products are as slow as ever.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    library = torch.library.Library("aten", "IMPL")

    def product(keys: torch.DispatchKeySet, left: Tensor, right: Tensor) -> Tensor:
        if left.dtype != torch.bfloat16:
            return torch.addmm(left.new_zeros(()), left, right, beta=0)
        rows, inner, columns = *left.shape, right.shape[1]
        out = left.new_empty(rows, columns)
        high, wide = min(rows, _HIGH), min(columns, max(1, _PIECE // inner))
        # Few and large: where every block of memory is mapped by itself, a thousand small ones take most of the time.
        first, second, result = (torch.empty(n) for n in (high * inner, inner * wide, high * wide))
        zero = result.new_zeros(())
        for j in range(0, columns, wide):
            part = right[:, j : j + wide]
            factor = second[: part.numel()].view(part.shape).copy_(part)
            for i in range(0, rows, high):
                band = left[i : i + high]
                piece = result[: len(band) * factor.shape[1]].view(len(band), -1)
                torch.addmm(zero, first[: band.numel()].view(band.shape).copy_(band), factor, beta=0, out=piece)
                out[i : i + high, j : j + wide] = piece
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel already
        library.impl("mm", product, "CPU", with_keyset=True, allow_override=True)
    return library


def autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    _with_products()
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch).loss  # type: ignore[no-any-return]


def on_cpu(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return loss(model, batch)


def images(n: int, side: int = 224) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, side, side), torch.zeros(n, dtype=torch.int64)


def volumes(n: int, side: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, side // 2, side, side), torch.zeros(n, side // 2, side, side, dtype=torch.int64)


def tokens(n: int, length: int = 128, classes: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(8192, (n, length))
    return {"input_ids": ids, "labels": torch.zeros(n, dtype=torch.int64) if classes else ids}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=8192))


def llama(layers: int = 4, width: int = 512) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _bert_blocks() -> tuple[type[nn.Module], ...]:
    from transformers.models.bert.modeling_bert import BertLayer

    return (BertLayer,)


def _llama_blocks() -> tuple[type[nn.Module], ...]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return (LlamaDecoderLayer,)


class Subject:
    """A model, a batch of a size, a loss, and the blocks that checkpointing takes."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        make: Callable[[int], Any],
        loss: Callable[[nn.Module, Any], Tensor],
        size: int,
        blocks: Callable[[], tuple[type[nn.Module], ...]],
    ) -> None:
        self.build, self.make, self.loss, self.size, self.blocks = build, make, loss, size, blocks

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


SUBJECTS = {
    "ResNet-50": Subject(resnet50, images, classify, 16, lambda: (Bottleneck,)),
    "BERT-base": Subject(bert, tokens, named, 8, _bert_blocks),
    "3-D U-Net": Subject(UNet3d, volumes, classify, 2, lambda: (DoubleConv,)),
    "Llama-like, bf16": Subject(
        llama, functools.partial(tokens, length=256, classes=False), autocast, 8, _llama_blocks
    ),
}
TRANSFORMERS = ("BERT-base", "Llama-like, bf16")


# ---------------------------------------------------------------- rows


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add(path: Path, row: dict[str, Any]) -> None:
    row = {**row, **environment()}
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(", ".join(f"{k}={v}" for k, v in row.items() if v not in ("", None))[:300], flush=True)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def without(path: Path, is_old: Callable[[dict[str, str]], bool]) -> None:
    """Take rows out of a file, before they are measured anew."""
    rows = read(path)
    kept = [row for row in rows if not is_old(row)]
    if not kept:
        path.unlink(missing_ok=True)
    elif len(kept) < len(rows):
        write(path, kept)


def steps(names: list[str], chosen: list[str], run: Run) -> None:
    """Each mode and each plan in processes of its own, one after the other."""
    done = {(row["subject"], row["mode"], row["part"]) for row in read(STEPS)}
    for name in names:
        for mode in MODES:
            if mode in chosen and (name, mode, "") not in done and not run.is_over():
                _measure(name, mode)
        wanted = [(p, str(part)) for p in PLANS if p in chosen for part in PARTS[p] if (name, p, str(part)) not in done]
        if wanted and not run.is_over():
            _plans(name, wanted, run)


def _measure(name: str, mode: str) -> None:
    model, batch, loss, method = _way(name, mode)
    add(STEPS, _row(name, mode, "", None, verify(method, model, batch, loss, plain=False, steps=0)))


def _way(name: str, mode: str) -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor], str | None]:
    subject = SUBJECTS[name]
    model, batch, loss = subject.model(), subject.make(subject.size), subject.loss
    if mode == "checkpoint":
        model = checkpointed(model, subject.blocks())
    elif mode == "save_on_cpu":
        loss = functools.partial(on_cpu, loss)
    return model, batch, loss, mode if mode in lowtide.methods() else None


def times(names: list[str], chosen: list[str], run: Run, turns: int) -> None:
    """Times of rows: all have a process of their own at the same time, and step by turns, plain among them."""
    for name in names:
        rows = [row for row in read(STEPS) if row["subject"] == name and row["mode"] in chosen and not row["time"]]
        # A plan that was made elsewhere cannot be run here.
        rows = [row for row in rows if row["mode"] in MODES or run.file(name, row["mode"], row["part"]).exists()]
        if not rows:
            continue
        ways = {"plain": {"mode": "plain", "part": ""}} | {f"{row['mode']} {row['part']}".strip(): row for row in rows}
        processes = {way: _process(name, row, run, turns) for way, row in ways.items()}
        found = take_turns(processes, turns, "plain")
        every = read(STEPS)
        for way, row in ways.items():
            if row in every:
                cells = {key: f"{found[way][metric]:.4f}" for key, metric in _TIMES.items()}
                every[every.index(row)].update(cells)
                print(name, way, *cells.values(), flush=True)
        write(STEPS, every)


def _process(name: str, row: dict[str, str], run: Run, turns: int) -> Child:
    """One that steps when told to."""
    file = str(run.file(name, row["mode"], row["part"])) if row["mode"] in PLANS else None
    argument = {"subject": name, "mode": row["mode"], "plan": file, "turns": turns}
    return Child("evidence.planning:timed", argument, exact_rss=False)


def timed(argument: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """In a child: report the seconds of each turn, after the steps in which a method decides."""
    model, batch, loss, method = _way(argument["subject"], argument["mode"])
    plan = method if argument["plan"] is None else lowtide.BudgetPlan.load(argument["plan"])
    session = None if plan is None else new_session(model, plan, {})
    step = _stepper(model, lambda: loss(model, batch), session)
    emit({})
    for _ in range(argument["turns"]):
        began = time.perf_counter()
        step()
        emit({"seconds": time.perf_counter() - began})
    return {}


def _plans(name: str, wanted: list[tuple[str, str]], run: Run) -> None:
    subject = SUBJECTS[name]
    model, batch = subject.model(), subject.make(subject.size)
    profile = run.profile(name, model, batch)
    others = {row["mode"]: int(row["peak"]) for row in read(STEPS) if row["subject"] == name}
    smallest = {mode: run.smallest(profile, mode) for mode in dict.fromkeys(mode for mode, _ in wanted)}
    for mode, part in wanted:
        share = 0.0 if part in MODES else float(part)
        if run.is_over() or (part in MODES and part not in others) or 0 < share * profile.peak < smallest[mode]:
            continue
        budget = budget_for(others[part]) if part in MODES else max(int(share * profile.peak), smallest[mode])
        try:
            plan = lowtide.plan(profile, budget, allow=PLANS[mode], time_weight=TIME_WEIGHTS.get(mode, 1.0))
        except lowtide.BudgetError as error:
            print(f"{name}, {mode} for the peak of {part}: {error}", flush=True)
            continue
        if mode == "plan with checkpoints" and not plan.checkpoints:  # then it is a plan without them
            continue
        plan.save(run.file(name, mode, part))
        found = verify(plan, model, batch, subject.loss, plain=False, steps=0)
        row = {"plain_predicted": profile.peak, "budget": budget}
        add(STEPS, _row(name, mode, part, plan, found) | row)


class Run:
    """Until when rows are measured, and the folder in which profiles and plans are kept."""

    def __init__(self, minutes: float, folder: Path) -> None:
        self.end, self.folder = time.monotonic() + 60 * minutes, folder

    def file(self, *names: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{'-'.join(names).replace(',', '').replace(' ', '_')}.json"

    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def smallest(self, profile: lowtide.Profile, mode: str) -> int:
        """The smallest budget of a plan with an error of at most so much."""
        predicted = lowtide.plan(profile, error=ERROR, allow=PLANS[mode]).predicted
        assert predicted is not None
        return budget_for(predicted.peak)

    def profile(self, name: str, model: nn.Module, batch: Any) -> lowtide.Profile:
        file = self.file(name)
        if file.exists():
            return lowtide.Profile.load(file)
        loss = SUBJECTS[name].loss
        made = lowtide.profile(model, batch, loss, measure=loss is not autocast)
        made.save(file)
        return made


def _row(name: str, mode: str, part: str, plan: lowtide.BudgetPlan | None, found: Any) -> dict[str, Any]:
    expected = None if plan is None else plan.predicted
    return {
        "subject": name,
        "mode": mode,
        "part": part,
        "budget": "",
        "peak": found.peak,
        "error": f"{found.error:.4g}",
        "predicted_peak": "" if expected is None else expected.peak,
        "predicted_error": "" if expected is None else f"{expected.error:.4g}",
        "predicted_slowdown": "" if expected is None else f"{expected.slowdown or 0:.4g}",
        "plain_predicted": "",
        **dict.fromkeys(_TIMES, ""),
    }


def blocks(names: list[str]) -> None:
    """What is predicted of checkpoints, of plans, and of both together, from one step without data."""
    done = {row["subject"] for row in read(BLOCKS)}
    for name in names:
        if name in done:
            continue
        subject = SUBJECTS[name]
        profile = lowtide.profile(subject.model(), subject.make(subject.size), subject.loss, fake=True, measure=False)
        parts = candidates(profile)
        row = {
            "subject": name,
            "blocks": len(parts),
            "plain": profile.peak,
            "checkpoint": with_checkpoints(profile, parts).peak,
        }
        for allow in PLANS.values():
            key = "checkpoint_least" if allow == ("checkpoint",) else "+".join(allow)
            row[key] = min(s.peak for p in Problem.all(profile, allow) for s in path(p.base, p.items))
        add(BLOCKS, row)


def fits(names: list[str], chosen: list[str], budget: str = "2 GiB") -> None:
    """The largest batch for a budget, each verified by a real step, which is not timed."""
    done = {(row["subject"], row["way"]) for row in read(FITS)}
    for name in names:
        subject = SUBJECTS[name]
        for way in WAYS:
            if way not in chosen or (name, way) in done:
                continue
            model = subject.model()
            if way == "checkpoint":
                model = checkpointed(model, subject.blocks())
            method, allow = ("plan", PLANS[way]) if way in PLANS else ("plain", ())
            settings = {"method": method, "allow": allow, "measure": subject.loss is not autocast}
            limit, given = nbytes_of(budget), nbytes_of(budget)
            while True:  # as fit itself does it, but without the time of a step
                found = lowtide.fit(model, subject.make, subject.loss, limit, run=False, **settings)
                batch = subject.make(found.size)
                measured = verify(found.plan, model, batch, subject.loss, plain=False, steps=0, compare=False)
                if measured.peak <= given:
                    break
                limit = given - (measured.peak - found.peak)
            row = {
                "subject": name,
                "way": way,
                "budget": given,
                "size": found.size,
                "predicted_peak": found.peak,
            }
            add(FITS, row | {"peak": measured.peak, "seconds": "", "error": ""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "times", "blocks", "fit", "products", "sizes", "page"])
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    rows = [*MODES, *PLANS]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, help="those of steps and fit")
    parser.add_argument("--turns", type=int, default=_TURNS, help="of times")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row of steps after so many")
    folder = Path(tempfile.gettempdir()) / "lowtide-planning"
    parser.add_argument("--profiles", type=Path, default=folder, help="a folder for profiles and plans")
    parser.add_argument("--again", action="store_true", help="measure these rows anew")
    arguments = parser.parse_args()
    names, chosen, run = arguments.subjects, arguments.rows, Run(arguments.minutes, arguments.profiles)
    if arguments.again and arguments.what in ("steps", "fit"):
        file, key = (STEPS, "mode") if arguments.what == "steps" else (FITS, "way")
        without(file, lambda row: row["subject"] in names and row[key] in chosen)
    if arguments.what == "steps":
        steps(names, chosen, run)
    elif arguments.what == "times":
        times(names, chosen, run, arguments.turns)
    elif arguments.what == "blocks":
        blocks(names)
    elif arguments.what == "fit":
        fits(names, chosen)
    elif arguments.what == "products":
        from evidence.planning_products import products

        products([name for name in names if name in TRANSFORMERS], run)
    elif arguments.what == "sizes":
        from evidence.planning_sizes import sizes

        sizes()
    else:
        from evidence.planning_page import page

        page()


if __name__ == "__main__":
    from evidence import planning  # under this name other processes find the functions that they are sent

    planning.main()
