"""What checkpoints keep of a small Llama, exactly and compressed: bytes, peak of a step, error of the gradient.

The network is transformers' own, in fp32, trained for a while on the bytes of the licence, so that its activations are
not those of fresh weights. All runs in one child process, whose resident memory follows live memory.
"""

from __future__ import annotations

import argparse
import csv
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from benchmarks.chart import DOCS
from evidence.derived import read
from evidence.fidelity import RESULTS, environment
from lowtide.codecs import Cast, Codec, GroupQuant
from lowtide.machine.measure import peak_above, resident, run_child

LAYERS, WIDTH, ROWS, TOKENS = 8, 256, 4, 512
STEPS = 30
DRAWS = 2
WAYS: dict[str, tuple[str, Codec | None]] = {
    "no checkpoint": ("plain", None),
    "no checkpoint, `attach(model)`": ("attached", None),
    "`torch.utils.checkpoint`": ("torch", None),
    "`lowtide.checkpoint`, bfloat16": ("own", Cast("bfloat16")),
    "`lowtide.checkpoint`, 8 bits (default)": ("own", None),
    "`lowtide.checkpoint`, 4 bits": ("own", GroupQuant(4, dither=True)),
    "`torch.utils.checkpoint`, `attach(model)`": ("torch attached", None),
}
FIELDS = [
    *("way", "held_mib", "peak_mib", "error", "boundary_plain", "boundary_stored", "draws"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]
MIB = 2**20


def text() -> Tensor:
    """Bytes as tokens."""
    data = (Path(__file__).parent.parent / "LICENSE").read_bytes()
    return torch.tensor(list(data))


def network() -> nn.Module:
    """With fresh weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=11 * WIDTH // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
    )
    return LlamaForCausalLM(config)


def trained() -> nn.Module:
    """The network, after a few steps on the text."""
    model, tokens = network(), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        first = torch.randint(len(tokens) - 65, (8,))
        batch = torch.stack([tokens[i : i + 64] for i in first.tolist()])
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def use_checkpoints(model: Any, function: Callable[..., Any] | None) -> None:
    """Run every layer of the network through a checkpoint function, or none of them."""
    if function is None:
        model.gradient_checkpointing_disable()
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function


def measure(argument: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """In a child: every way, its error first and then its memory."""
    model, tokens = network(), text()
    model.load_state_dict(torch.load(argument["weights"]))
    batch = torch.stack([tokens[i * TOKENS : (i + 1) * TOKENS] for i in range(ROWS)])
    exactly = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    def loss() -> Tensor:
        return model(input_ids=batch, labels=batch, use_cache=False).loss  # type: ignore[no-any-return]

    def gradient() -> Tensor:
        model.zero_grad()
        loss().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    use_checkpoints(model, exactly)
    exact = gradient()
    for way, (kind, codec) in WAYS.items():
        own = functools.partial(lowtide.checkpoint, codec=codec)
        use_checkpoints(model, own if kind == "own" else exactly if kind.startswith("torch") else None)
        handle = lowtide.attach(model) if kind.endswith("attached") else None
        errors = []
        for draw in range(DRAWS):
            torch.manual_seed(draw)  # from which lowtide.checkpoint takes its noise; a session counts its steps
            errors.append(float((gradient() - exact).norm() / exact.norm()))
        found = [s for s in handle.report().sites if s.site.op == "Checkpoint"] if handle is not None else []
        model.zero_grad()
        peak = peak_above(lambda: loss().backward())
        model.zero_grad()
        before = resident("VmRSS")
        kept = loss()
        held = resident("VmRSS") - before
        del kept
        if handle is not None:
            handle.remove()
        emit(
            {
                "way": way,
                "held_mib": held / MIB,
                "peak_mib": peak / MIB,
                "error": sum(errors) / DRAWS,
                "boundary_plain": sum(s.plain_nbytes for s in found),
                "boundary_stored": sum(s.stored_nbytes for s in found),
                "draws": DRAWS,
            }
        )
    return {}


def table(rows: list[dict[str, str]]) -> str:
    """The rows for the page."""
    first = rows[0]
    each = ROWS * TOKENS * WIDTH * 4 / MIB
    lines = [
        f"{LAYERS} layers of width {WIDTH}, {ROWS} rows of {TOKENS} tokens, fp32, {STEPS} steps trained. The input of",
        f"a layer has {each:.0f} MiB, of all {LAYERS * each:.0f}. Commit {first['commit']}, {first['date']},",
        f"{first['machine']}, Python {first['python']}, torch {first['torch']}.",
        "",
        "| layers run through | held after forward, MiB | peak of a step, MiB | error of the gradient |",
        "|---|---|---|---|",
    ]
    for row in rows:
        error = float(row["error"])
        cells = (row["way"], f"{float(row['held_mib']):.1f}", f"{float(row['peak_mib']):.1f}", f"{error:.2g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "checkpointing.csv")
    parser.add_argument("--page", type=Path, default=DOCS / "checkpointing.md", help="its table is replaced")
    parser.add_argument("--page-only", action="store_true", help="from the rows that are there")
    given = parser.parse_args()
    rows = read(given.out)
    if not given.page_only:
        machine, rows = environment(), []

        def note(found: dict[str, Any]) -> None:
            rows.append({k: f"{v:.5g}" if isinstance(v, float) else str(v) for k, v in (found | machine).items()})
            print(*(f"{key} {rows[-1][key]}" for key in FIELDS[:6]), sep="  ", flush=True)

        with tempfile.TemporaryDirectory() as folder:
            weights = f"{folder}/weights.pt"
            torch.save(trained().state_dict(), weights)
            run_child("evidence.checkpointing:measure", {"weights": weights}, exact_rss=True, on_event=note)
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    page = given.page.read_text(encoding="utf-8")
    made = re.sub(r"(?s)(<!-- table -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{table(rows)}\n{m[2]}", page)
    given.page.write_text(made, encoding="utf-8")
    print(f"{len(rows)} rows in {given.out}, a table in {given.page}")


if __name__ == "__main__":
    main()
