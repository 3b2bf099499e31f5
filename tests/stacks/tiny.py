"""Small models and data for all stacks, and how a run is compared with the plain one."""

from __future__ import annotations

import math
import statistics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowtide.policy.methods import resolve
from test_zoo import WorstMethod, distance

VOCABULARY = 128
LENGTH = 48
BATCH = 4


def llama(**changes):
    """A Llama of two layers with random weights, the same ones each time."""
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | changes)))


def samples(count=32):
    """Token ids with a pattern that can be learned, as a list of examples of a language model."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 5, (count, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def batches(count):
    """The first batches of the samples, as dicts of tensors."""
    rows = samples(count * BATCH)
    return [
        {key: torch.stack([row[key] for row in rows[i : i + BATCH]]) for key in rows[0]}
        for i in range(0, len(rows), BATCH)
    ]


def weights(model):
    """Copies of all trainable weights by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same_weights(got, expected):
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, f"{len(different)} of {len(expected)} weights differ, first {different[0]}"


def moved(after, before):
    """What a step of SGD at rate 1 subtracted: the gradient."""
    return {name: (before[name] - after[name]).float() for name in after}


def assert_errors_within_bounds(gradient, exact, draws=2):
    """``gradient(method, seed)`` at 8 and 4 bits of ActNN, against ``exact``.

    The bound is that of ``tests/test_zoo.py``: the same step with Gaussian noise of the largest variance that random
    rounding can have; 1.5 leaves room for few draws. 8 bits have 17 times smaller steps than 4 (255 / 15), so
    errors must be at least half as many times smaller.
    """
    errors = {}
    for bits in (8, 4):
        method = resolve("actnn", {"bits": bits, "propagating_bits": bits})
        found, bound = (
            math.sqrt(statistics.fmean(distance(gradient(each, seed), exact) ** 2 for seed in range(draws)))
            for each in (method, WorstMethod(method))
        )
        assert 0 < found < 1.5 * bound, f"{bits} bits: an error of {found:.4f} against a bound of {bound:.4f}"
        errors[bits] = found
    assert errors[8] < errors[4] * 15 / 255 * 2
    assert errors[4] < 0.5
