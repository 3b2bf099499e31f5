"""LoRA on a Llama, in four modes: exact, Lowtide, checkpointing, and checkpointing with Lowtide.

    python examples/lora_llama.py                     # all four modes, each in a process of its own, and a table
    python examples/lora_llama.py --text book.txt     # on your own text; else on Python's language reference
    python examples/lora_llama.py --page FILE         # write the table into a page

The weights of the base model are random and no network is used. So the base is first trained for a while on the first
half of the text, exactly, and its LoRA adapters are then trained on the second half. Each byte of text is a token.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.machine.measure import peak_above, resident, run_child

MODES = ("exact", "lowtide", "checkpoint", "checkpoint + lowtide")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BEGIN, END = "<!-- lora: begin -->", "<!-- lora: end -->"


def read_text(path: str | None) -> bytes:
    """The bytes of a file, or Python's language reference, which every Python has."""
    if path is not None:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def batches(text: bytes, job: dict, steps: int, seed: int):
    """Random pieces of a text."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    if len(tokens) <= job["length"]:
        raise SystemExit(f"half of the text has {len(tokens)} bytes; a sample has {job['length']}: give a longer text")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - job["length"], (job["batch"],), generator=generator)
        yield torch.stack([tokens[start : start + job["length"]] for start in starts.tolist()])


def base_model(job: dict) -> LlamaForCausalLM:
    """A Llama as ``job`` describes it, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=job["hidden"],
        intermediate_size=job["hidden"] * 8 // 3 // 16 * 16,
        num_hidden_layers=job["layers"],
        num_attention_heads=job["hidden"] // 64,
        num_key_value_heads=max(1, job["hidden"] // 128),
        max_position_embeddings=job["length"],
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(getattr(torch, job["dtype"]))


def step(model, tokens, optimizer) -> float:
    """One step of training; returns the loss."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_base(job: dict, emit) -> dict:
    """Train the base on the first half of the text, and save it."""
    text = read_text(job["text"])
    model = base_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = float("nan")
    for tokens in batches(text[: len(text) // 2], job, job["base_steps"], seed=1):
        loss = step(model, tokens, optimizer)
    torch.save(model.state_dict(), job["base"])
    return {"loss": loss, "text": len(text), "parameters": sum(p.numel() for p in model.parameters())}


def prepared(job: dict):
    """The base with LoRA in the mode of ``job``: model, optimizer, and Lowtide's handle if it is at work."""
    model = base_model(job)
    model.load_state_dict(torch.load(job["base"]))
    torch.manual_seed(0)
    config = LoraConfig(r=job["rank"], lora_alpha=2 * job["rank"], target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    if "checkpoint" in job["mode"]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    handle = lowtide.attach(model, job["method"], bits=job["bits"]) if "lowtide" in job["mode"] else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    return model, optimizer, handle


def fine_tune(job: dict, emit) -> dict:
    """Train in one mode: losses, seconds of a step, the error of the last gradient."""
    text = read_text(job["text"])
    model, optimizer, handle = prepared(job)
    losses, seconds = [], []
    for tokens in batches(text[len(text) // 2 :], job, job["steps"], seed=2):
        begun = time.perf_counter()
        losses.append(step(model, tokens, optimizer))
        seconds.append(time.perf_counter() - begun)
    warm = seconds[min(5, len(seconds) - 1) :]
    result = {"losses": losses, "seconds": statistics.median(warm), "error": 0.0}
    if handle is not None:
        compressed = gradient(model, tokens)
        handle.remove()
        exact = gradient(model, tokens)
        result["error"] = float((compressed - exact).norm() / exact.norm())
    return result


def gradient(model, tokens) -> torch.Tensor:
    """The gradient of all trained weights, in one vector."""
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def measure(job: dict, emit) -> dict:
    """Bytes that a forward leaves for its backward, and the peak of a step above the state of rest.

    Both are of resident memory, which follows live memory in this process, and are not Lowtide's own figures.
    """
    text = read_text(job["text"])
    model, optimizer, handle = prepared(job)
    *first, last = batches(text[len(text) // 2 :], job, 4, seed=2)
    for tokens in first:  # compile, and let an adaptive method decide
        step(model, tokens, optimizer)
    before = resident("VmRSS")
    loss = model(input_ids=last, labels=last).loss
    kept = resident("VmRSS") - before
    loss.backward()
    optimizer.zero_grad()
    del loss
    peak = peak_above(lambda: step(model, last, optimizer))
    return {"kept": kept, "peak": peak, "report": None if handle is None else str(handle.report()).splitlines()[0]}


def run(job: dict) -> tuple[dict, dict[str, dict]]:
    """All modes, each in processes of its own: one for time and losses, one for memory."""
    with tempfile.TemporaryDirectory() as folder:
        job = {**job, "base": str(Path(folder, "base.pt"))}
        base = run_child("lora_llama:train_base", job, exact_rss=False)
        rows = {}
        for mode in job["modes"]:
            this = {**job, "mode": mode}
            rows[mode] = run_child("lora_llama:fine_tune", this, exact_rss=False)
            rows[mode] |= run_child("lora_llama:measure", this, exact_rss=True)
    return base, rows


def table(rows: dict[str, dict]) -> str:
    """What each mode cost, and how its loss fell."""
    count = len(next(iter(rows.values()))["losses"])
    size = max(1, count // 10)
    marks = sorted({size, *(count * part // 4 for part in (1, 2, 3)), count} - {0})
    head = ["mode", "kept MiB", "peak MiB", "s a step", "gradient error", *(f"loss at {mark}" for mark in marks)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for mode, row in rows.items():
        losses = [statistics.fmean(row["losses"][max(0, mark - size) : mark]) for mark in marks]
        cells = [f"{row['kept'] / 2**20:.1f}", f"{row['peak'] / 2**20:.1f}", f"{row['seconds']:.3f}"]
        cells += [f"{row['error']:.3f}" if row["error"] else "0", *(f"{loss:.3f}" for loss in losses)]
        lines.append("| " + " | ".join((mode, *cells)) + " |")
    return "\n".join((*lines, "", f"Each loss is the mean of {size} steps."))


def machine() -> str:
    """What the figures were made with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    load = os.getloadavg()[0]
    return (
        f"{datetime.date.today()}, commit {commit or 'unknown'}, {versions}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads of {platform.machine()}, load {load:.1f} at the end."
    )


def main() -> None:
    """Parse arguments, run, print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a text file; Python's language reference if it is not given")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be repeated; all if it is not given")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--page", type=Path, help="a page whose table is to be replaced")
    for name, value in (
        *(("base-steps", 300), ("steps", 200), ("layers", 4), ("hidden", 256), ("length", 256), ("batch", 8)),
        ("rank", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    page, modes = given.pop("page"), given.pop("mode") or MODES
    job = {**given, "modes": list(modes), "text": given["text"] and str(Path(given["text"]).resolve())}
    base, rows = run(job)
    about = (
        f"A Llama of {base['parameters'] / 1e6:.1f} million weights in {job['dtype']} ({job['layers']} layers of "
        f"{job['hidden']}), trained for {job['base_steps']} steps to a loss of {base['loss']:.3f}; LoRA of rank "
        f"{job['rank']} on all linear layers of its blocks, {job['batch']} samples of {job['length']} tokens, "
        f"`{job['method']}` at {job['bits']} bits. The text has {base['text']:,} bytes."
    )
    found = "\n\n".join((about, table(rows), machine()))
    print(found)
    for mode, row in rows.items():
        if row["report"]:
            print(f"{mode}: {row['report']}")
    if page is not None:
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
