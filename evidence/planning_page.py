"""Write docs/planning.md and draw docs/planning.svg from the rows of ``evidence.planning``."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.chart import COLORS, DOCS, new_figure, save
from evidence.planning import BLOCKS, FITS, MODES, PLANS, SIZES, STEPS, read
from lowtide.planning.planner import budget_for

Row = dict[str, str]
_LINES = dict(zip(PLANS, ("#d1495b", "#edae49", "#00798c", "#8a5a44"), strict=True))
_OTHER = "#6c757d"
_MIB = 2**20
_TIMES = ("time", "time_least", "time_most")

_HEAD = """# Budget in, plan out

```python
import lowtide

profile = lowtide.profile(model, batch, loss_fn)  # where the memory of one step goes; fake=True needs no memory
print(profile)
plan = lowtide.plan(profile, "2 GiB")  # or ratio=8, bits=3, error=0.05
plan = lowtide.plan(profile, "2 GiB", allow=("compress", "rebuild", "checkpoint"))  # whole blocks may run again
print(plan.summary())
print(plan.verify(model, batch, loss_fn))  # real steps in child processes, beside what was predicted
handle = lowtide.attach(model, plan)

handle = lowtide.attach(model, budget="2 GiB")  # the same in one line: plans by itself
print(lowtide.fit(model, make_batch, loss_fn, "2 GiB"))  # the largest n for which make_batch(n) fits
with lowtide.explain_oom(model, batch, loss_fn):  # if memory runs out: what held it, and a plan that fits
    loss_fn(model, batch).backward()
```

From a shell: `lowtide profile`, `lowtide plan --budget "2 GiB"` and `lowtide fit --budget "2 GiB"` with a target
`file.py:function`, `module:function`, `hf:CONFIG` or `timm:NAME`. `--allow compress,rebuild,checkpoint` says what a
plan may do, and `--optimizer adamw` counts what that optimizer keeps.

## How a peak is predicted

A profile is one plain step, written down: each storage with the moments of its birth and its death, when each saved
tensor is left to the graph alone, and when backward reads it. Recorded on tensors without data it is the same, byte for
byte, so nothing of it needs memory or a device. A plan is judged on these moments: until it is left to the graph a
tensor is there in full; then in its stored form; in backward in full again, beside its stored form, for as long as an
operator reads it. Weights, gradients, optimizer state, the batch and everything else stay as they were. What operators
take inside themselves (oneDNN copies the operands of a convolution into its own order) shows to no profiler; it is
measured once for each machine in a child process and added at the moments of these operators. Less than 1 MiB cannot be
told from other objects of the process and counts as nothing, and of a budget only one part in 128 is left free. So a
step of a few MiB may be up to 1 MiB above its budget. `lowtide.fit` scales what a small batch takes; where the real
step is above the budget it tries a smaller one.

The cost of a choice is the noise that it adds to every weight's gradient and to the whole, as `auto` measures it
(`docs/methods.md`), and its time on this machine: that of its codec, and that of page faults, because each read of a
stored tensor takes memory that a kept one has. Faults are measured with the allocator that the process has. With the
default of glibc they are most of the time that a plan adds; after `lowtide.tune_cpu_allocator()` there are hardly any,
so tune before you plan. A tenth of a step's time counts as much as an error of a tenth; `time_weight` changes that, and
with `time_weight=0` the error alone counts.

Three solvers take the same numbers. `"greedy"` walks from the plain step downwards: at the highest moment it takes the
change that costs least for each byte, until the budget is met. `"lagrangian"`, which plans use unless told otherwise,
begins with that, lets the bytes of each moment have a price, and looks at what is one change away from the best that it
found. It never costs more than `"greedy"`, and near the smallest peak far less. Both look for plans without regard to
the budget, and take the cheapest that fits, so a larger budget never costs more. `"exact"` is for a dozen tensors. All
of them also know what `auto` would choose with 2, 3, 4 and 6 bits a value, judged by the same peak, time and error, so
no plan costs more than those of these that fit the budget. What codes of log-probabilities add to the error is not
measured, and counts as nothing.

A ReLU whose result is stored reads packed bits in backward, and takes no memory for a mask. A batch norm on the CPU
reads the codes of its input, if they are those of groups or blocks, and takes no memory for the input. What is on its
way to host memory, or fetched before it is read, counts with as much as a session allows: 256 MiB, or one tensor.

## Blocks that run again

With `"checkpoint"` among `allow` a plan may also let whole blocks run again in backward: members of a `Sequential` or
a `ModuleList` that have modules inside, or the modules that `blocks="layers.*.mlp"` names. That changes no gradient,
it costs the time of the block's forward, and it composes with compression of everything outside of the blocks. A
session replaces the `forward` of these modules for as long as it is open, and takes that back after an exception too.
The second run has the random numbers and the autocast of the first, and leaves buffers alone, so batch norms count a
batch once.

No second profile is needed for the peak. What a block saves goes when its forward has ended and is made again before
its backward begins, with everything else that its forward made; what the block was given stays until its backward has
ended. These moments are inserted into those of the plain step. Which blocks run again is tried for the first of them,
and for those that free most bytes for their time, from none to all; each of these choices is solved for the rest, and
the cheapest is taken. The choices do not depend on the budget either. Without data a forward counts as a third of a
step, divided among blocks by what they save.

What a block was given is kept as it is. A module can run again only if it is called once in a forward and does not
change what it was given; others are not considered. Inside a checkpoint of your own, blocks are left to that. Hooks of
modules inside a block run twice, as in any checkpoint. `ratio` and `bits` count what is stored of each tensor, so they
do not go with `"checkpoint"`.

The result of a linear layer or a convolution is not made again by itself (`docs/design.md` has what that would gain).
Name the smallest module around it: that is exact, where a product with rounded factors would not be.
"""


def _mib(nbytes: str | float) -> str:
    return f"{float(nbytes) / _MIB:.0f}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _where(rows: list[Row]) -> str:
    named = sorted({f"{r['machine']}, Python {r['python']}, torch {r['torch']}, {r['threads']} threads" for r in rows})
    commits = sorted({row["commit"] for row in rows})
    return f"Machine: {'; '.join(named)}. Commit {', '.join(commits)}."


def _subjects(rows: list[Row]) -> dict[str, list[Row]]:
    """For each network its rows, in the order of the tables."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["subject"], []).append(row)
    for own in found.values():
        own.sort(key=lambda row: ([*MODES, *PLANS].index(row["mode"]), -int(row["budget"] or 0)))
    return found


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def verdict(own: list[Row]) -> str:
    """Which other ways have no smaller peak and error than some plan, and how the times of such plans compare.

    A plan may measure as much as the budget for which another way's peak is the predicted one; what is more than that
    peak is said. Of two times one is less if all of its interval is.
    """
    below, above, timed = [], [], {}
    for other in own:
        if other["mode"] in PLANS or other["mode"] == "plain":
            continue
        near = [row for row in own if row["mode"] in PLANS and int(row["peak"]) <= budget_for(int(other["peak"]))]
        fitting = [row for row in near if float(row["error"]) <= float(other["error"])]
        if fitting:
            more = 100 * (min(int(row["peak"]) for row in fitting) / int(other["peak"]) - 1)
            below.append(other["mode"] + (f" (with a peak {more:.1f} % above it)" if more > 0 else ""))
            fastest = min((row for row in fitting if row["time"]), key=lambda row: float(row["time"]), default=None)
            if fastest and other["time"]:
                timed[other["mode"]] = (fastest, other)
        else:
            least = min((float(row["error"]) for row in near), default=None)
            if least is None:
                nearest = min((row for row in own if row["mode"] in PLANS), key=lambda row: int(row["peak"]))
                more = 100 * (int(nearest["peak"]) / int(other["peak"]) - 1)
                said = f"the smallest plan needs {more:.1f} % more, with an error of {float(nearest['error']):.2g}"
            else:
                said = f"plans of its peak have an error of {least:.2g}"
            above.append(f"{other['mode']} ({said})")
    parts = [f"In peak and error plans are at or below {_listed(below)}."] if below else []
    if above:
        parts.append(
            f"They are not at or below {_listed(above)}." if below else "Plans are not at or below other ways."
        )
    if not timed:
        return " ".join([*parts, "These rows were not timed."])
    ratios = [f"{float(plan['time']) / float(other['time']):.2f}x of {mode}" for mode, (plan, other) in timed.items()]
    parts.append(f"The fastest of these plans take {_listed(ratios)}.")
    faster = [mode for mode, (plan, other) in timed.items() if float(plan["time_most"]) < float(other["time_least"])]
    slower = [mode for mode, (plan, other) in timed.items() if float(plan["time_least"]) > float(other["time_most"])]
    alike = [mode for mode in timed if mode not in (*faster, *slower)]
    for said, modes in (("They are faster than", faster), ("They are slower than", slower)):
        if modes:
            parts.append(f"{said} {_listed(modes)}.")
    if alike:
        parts.append(f"In time they are not told apart from {_listed(alike)}.")
    return " ".join(parts)


def _steps(rows: list[Row]) -> str:
    parts = [
        "## Budgets kept\n",
        "Peaks are of the whole step, weights, gradients and batch included, each in its own process; the smallest "
        "budget is that of the plan with a predicted error of at most 0.1. The error is that of the whole gradient, "
        "over two draws. Times were taken with glibc's default allocator. Each line has a process of its own, all are "
        "alive at the same time, and they step by turns; a time is the median over the turns of a step over plain's of "
        "the same turn, with the 95 % interval of that median in brackets. `auto` measures in one of these turns, so "
        "its interval reaches far. Plans that may run blocks again are listed where they do; an exact plan does "
        "nothing else, and a plan by error alone has "
        "`time_weight=0`. A budget named after another way is what that way measured and 1/127 more, so that the "
        "predicted peak may be that peak, because a plan leaves 1/128 of its budget in reserve. "
        "Beside another way a plan may measure as much as that reserve above its peak; where no plan has less, that is "
        "said.\n",
        "![Peak, time and error of plans and of other ways](planning.svg)\n",
    ]
    for name, own in _subjects(rows).items():
        plain = next(row for row in own if row["mode"] == "plain")
        lines = []
        for row in own:
            budget = f"{row['mode']} for {_mib(row['budget'])}" if row["mode"] in PLANS else row["mode"]
            budget += f" ({row['part']}'s)" if row["part"] in MODES else ""
            off = float(row["peak"]) / float(row["predicted_peak"]) if row["predicted_peak"] else None
            lines.append(
                [
                    budget,
                    _mib(row["peak"]),
                    f"{float(row['peak']) / float(plain['peak']):.2f}x",
                    "" if off is None else f"{_mib(row['predicted_peak'])} ({100 * (off - 1):+.1f} %)",
                    "{:.2f}x ({:.2f} to {:.2f})".format(*(float(row[k]) for k in _TIMES)) if row["time"] else "",
                    f"{float(row['predicted_slowdown']):.2f}x" if row["predicted_slowdown"] else "",
                    "exact" if float(row["error"]) == 0 else f"{float(row['error']):.2g}",
                    f"{float(row['predicted_error']):.2g}" if row["predicted_error"] else "",
                ]
            )
        head = ("", "peak, MiB", "of plain", "predicted", "time", "predicted", "error", "predicted")
        parts.append(f"### {name}\n\n{_table(head, lines)}\n\n{verdict(own)} {_where(own)}\n")
    return "\n".join(parts)


def _figure(rows: list[Row]) -> None:
    subjects = _subjects(rows)
    figure, axes = new_figure(2 * len(subjects), (3.1 * 2 * len(subjects), 3.2))
    for i, (name, own) in enumerate(subjects.items()):
        plain = next(row for row in own if row["mode"] == "plain")
        for axis, what in ((axes[2 * i], "time"), (axes[2 * i + 1], "error")):

            def place(row: Row, what: str = what, plain: Row = plain) -> tuple[float, float]:
                y = float(row[what])
                return float(row["peak"]) / float(plain["peak"]), y

            shown = [row for row in own if row[what]]
            for row in shown:
                x, y = place(row)
                if row["mode"] in PLANS or (what == "error" and y == 0):
                    continue
                axis.plot(x, y, "o", color=COLORS.get(row["mode"], _OTHER))
                axis.annotate(row["mode"], (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7.5)
            for mode, color in _LINES.items():
                plans = sorted(place(row) for row in shown if row["mode"] == mode and (what == "time" or place(row)[1]))
                if plans:
                    axis.plot(*zip(*plans, strict=True), "D-", color=color, markersize=4, label=mode)
            axis.set_title(f"{name}\n{'time of a step, plain = 1' if what == 'time' else 'gradient error'}", fontsize=9)
            axis.set_xlabel("peak, plain = 1")
            if what == "error":
                axis.set_yscale("log")
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False, fontsize=8)
    save(figure, DOCS / "planning.svg")


def _blocks(rows: list[Row]) -> str:
    measured = {row["subject"]: row["peak"] for row in read(STEPS) if row["mode"] == "checkpoint"}
    plain = {row["subject"]: row["peak"] for row in read(STEPS) if row["mode"] == "plain"}
    head = ("", "plain", "measured", "all blocks checkpointed", "measured", "plan", "checkpoints", "both")
    lines = [
        [
            row["subject"],
            *(_mib(row["plain"]), _mib(plain[row["subject"]])),
            *(_mib(row["checkpoint"]), _mib(measured[row["subject"]])),
            *(_mib(row[what]) for what in ("compress+rebuild", "checkpoint_least", "compress+rebuild+checkpoint")),
        ]
        for row in rows
    ]
    return (
        "## Smallest peaks with and without checkpoints\n\n**Computed**, in MiB, for the batches above, from one step "
        "without data and without what operators take inside themselves, which convolutions do; beside it what real "
        "steps measured. On the right the smallest peaks of plans that may compress and "
        "rebuild (2 bits at least, whatever the error), run blocks again, or both.\n\n"
        f"{_table(head, lines)}\n\n{_where(rows)}\n"
    )


def _fits(rows: list[Row]) -> str:
    lines = []
    for name in dict.fromkeys(row["subject"] for row in rows):
        own = {row["way"]: row for row in rows if row["subject"] == name}
        plain = int(own["plain"]["size"])
        for way, row in own.items():
            lines.append(
                [
                    name,
                    way,
                    row["size"],
                    f"{int(row['size']) / plain:.1f}x",
                    _mib(row["peak"]),
                    _mib(row["predicted_peak"]),
                ]
            )
    head = ("", "way", "batch", "of plain", "measured peak, MiB", "predicted")
    return (
        "## The largest batch for 2 GiB\n\nFound by `lowtide.fit` without data, then one real step of that size in a "
        "child process. No tensor gets fewer than 2 bits.\n\n"
        f"{_table(head, lines)}\n\n{_where(rows)}\n"
    )


def _sizes(rows: list[Row]) -> str:
    lines = []
    for name in dict.fromkeys(row["case"] for row in rows):
        own = {row["way"]: row for row in rows if row["case"] == name}
        first = next(iter(own.values()))
        ways = ("plain", "checkpoint", "plan", "checkpoint and plan")
        lines.append([name, first["budget"], first["unit"], *(own[way]["size"] if way in own else "" for way in ways)])
    head = ("", "card", "counted in", "plain", "checkpoint", "plan", "checkpoint and plan")
    return (
        "## What would fit larger cards\n\n**Computed, not run**: `lowtide.fit` on tensors without data, with the "
        "operators of the CPU, without the workspaces of the card's own libraries, without an optimizer. The loss of "
        "the language model is taken 4096 tokens at a time. The last column is a plan around the model's own "
        "checkpoints, whose inputs stay exact.\n\n"
        f"{_table(head, lines)}\n\n{_where(rows)}\n"
    )


def text() -> str:
    """The page."""
    parts = [_HEAD]
    for path, write in ((STEPS, _steps), (BLOCKS, _blocks), (FITS, _fits), (SIZES, _sizes)):
        rows = read(path)
        if rows:
            parts.append(write(rows))
    return "\n".join(parts)


def page() -> None:
    """Write the page and its figure."""
    rows = read(STEPS)
    if rows:
        _figure(rows)
    (DOCS / "planning.md").write_text(text(), encoding="utf-8")
