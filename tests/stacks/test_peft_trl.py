"""LoRA by PEFT, and TRL's trainers, beside themselves without Lowtide."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import VOCABULARY, assert_errors_within_bounds, assert_same_weights, batches, llama, moved, samples, weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import lowtide
from lowtide.integrations.hf import LowtideCallback
from lowtide.session import attached

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(dropout=0.0, model=None):
    """A Llama with LoRA on all linear layers of its blocks; both factors are random, so that all gradients flow."""
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=TARGETS, task_type="CAUSAL_LM")
    found = get_peft_model(llama() if model is None else model, config)
    torch.manual_seed(2)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return found


def train(method=None, steps=3, rate=0.1, dropout=0.0, **options):
    model = lora(dropout)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    handle = None if method is None else lowtide.attach(model, method, **options)
    torch.manual_seed(3)
    for batch in batches(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = None if handle is None else handle.report()
    return weights(model), report


@pytest.mark.stack("PEFT", "LoRA on all linear layers of a Llama, with and without dropout; errors at 4 and 8 bits")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_lora(dropout):
    expected, _ = train(dropout=dropout)
    assert all("lora_" in name for name in expected)
    got, report = train("lossless", dropout=dropout)
    assert_same_weights(got, expected)
    assert 0 < report.stored_nbytes <= report.plain_nbytes  # without dropout there is nothing to save losslessly
    assert train("actnn", dropout=dropout, bits=4)[1].ratio > 4
    before = weights(lora())
    once = {"steps": 1, "rate": 1.0, "dropout": dropout}
    exact = moved(train(**once)[0], before)
    assert_errors_within_bounds(lambda method, seed: moved(train(method, seed=seed, **once)[0], before), exact)


@pytest.mark.stack("PEFT", "merging the adapter after training")
def test_merging():
    model = lora()
    with lowtide.attach(model, "actnn"):
        model(**batches(1)[0]).loss.backward()
    x = batches(1)[0]["input_ids"]
    with torch.no_grad():
        before = model(x).logits
        merged = model.merge_and_unload()(x).logits
    # Sums of float32 in another order: 2**-23 for each of some 160 products, in two layers of seven matrices.
    assert (merged - before).abs().max() < 2**-23 * 160 * 14 * before.abs().max()


def tokenizer():
    """Words w0 to w127 and nothing else; no file and no network."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1", pad_token="w2", unk_token="w0")


def text(tokens):
    return " ".join(f"w{int(t)}" for t in tokens)


SETTINGS = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "gradient_checkpointing": False,
}


def sft(path, callback=None, peft=False):
    data = Dataset.from_dict({"text": [text(row["input_ids"]) for row in samples()]})
    trainer = SFTTrainer(
        llama(),
        SFTConfig(output_dir=str(path), max_length=48, **SETTINGS),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=[] if callback is None else [callback],
        peft_config=LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM") if peft else None,
    )
    trainer.train()
    return weights(trainer.model), trainer


def dpo(path, callback=None):
    rows = [row["input_ids"] for row in samples()]
    data = {
        "prompt": [text(row[:16]) for row in rows],
        "chosen": [text(row[16:]) for row in rows],
        "rejected": [text(row.flip(0)[:32]) for row in rows],
    }
    trainer = DPOTrainer(
        llama(),
        args=DPOConfig(output_dir=str(path), max_length=48, **SETTINGS),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        callbacks=[] if callback is None else [callback],
        peft_config=LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    trainer.train()
    return weights(trainer.model), trainer


def assert_like_plain(run, path, ratio):
    expected, _ = run(path)
    got, trainer = run(path, LowtideCallback("lossless"))
    assert_same_weights(got, expected)
    assert not attached(trainer.model)
    _, packed = run(path, LowtideCallback("actnn", bits=4))
    logs = [row for row in packed.state.log_history if "loss" in row]
    assert len(logs) == 3
    assert all(row["lowtide_plain_mib"] > ratio * row["lowtide_kept_mib"] > 0 for row in logs)


@pytest.mark.stack("TRL", "`SFTTrainer`, full fine-tuning and LoRA")
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_sft(tmp_path, peft):
    assert_like_plain(lambda path, callback=None: sft(path, callback, peft), tmp_path, 3)


@pytest.mark.stack("TRL", "`DPOTrainer` with LoRA")
def test_dpo(tmp_path):
    assert_like_plain(dpo, tmp_path, 2)
