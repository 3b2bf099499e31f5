"""Fine-tune a small Llama with transformers' ``Trainer`` and Lowtide: one callback more, nothing else changes.

python examples/hf_trainer.py                # Python's language reference as text, random weights, no network
torchrun --nproc_per_node=2 examples/hf_trainer.py --steps 100
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lowtide.integrations.hf import LowtideCallback


def samples(length: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of a text, each byte a token."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in tokens.split(length)[:-1]]


def main() -> None:
    """Train, and print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="output")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bits", type=int, default=4)
    given = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=672, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=given.length, use_cache=False,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        learning_rate=1e-3,
        logging_steps=max(1, given.steps // 10),
        save_steps=max(1, given.steps // 2),  # checkpoints hold Lowtide's state too; train(resume_from_checkpoint=True)
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    callback = LowtideCallback("auto", bits=given.bits)
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=samples(given.length), callbacks=[callback])
    trainer.train()
    if trainer.is_world_process_zero():
        print(callback.handle.report())


if __name__ == "__main__":
    main()
