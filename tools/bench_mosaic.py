"""Time one MosaicBERT training step, ours against two other implementations,
on the same texts in one run.

    python tools/bench_mosaic.py --data MDS [--config FILE] [--length 128] [--sequences 16]
                                 [--json FILE]

The published step is reproduced in plain PyTorch with our model's weights, so that values and times
can be compared: every text is padded to one length, `torch.nn.functional`'s attention adds a float
bias of [S, N, L, L] (ALiBi, and -10000 at padding), all layers and the decoder run on all S x L
positions, and `torch.optim.AdamW` updates tensor by tensor. An expert's version splits the texts
into the fastest number of groups of similar length, each padded to its longest text, computes
logits of masked tokens only, and uses fused AdamW.

Legend: S sequences, L padded length, D hidden, N heads, H head size, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import IGNORED_LABEL, HostBatch
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading.masked_text import TRUNCATE, TextSet, TextSource
from mlbert.distributed.sharding import ShardLayout
from mlbert.host.provenance import shipped
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.huggingface import padded_inputs
from mlbert.ops import api as ops
from mlbert.ops.precision import compute_dtype
from mlbert.optim.adamw import DecoupledAdamW
from mlbert.optim.flat import FlatParameters
from mlbert.programs.bench.expert import GROUPS, TRIALS, make_groups
from mlbert.programs.bench.sides import LEARNING_RATE, Side, alternate, trained_side
from mlbert.programs.bench.step_time import common_record, pair_ratios

CONFIG = shipped("configs") / "mosaic_base.json"
MASKED_SCORE = -10_000.0
# Settings of AdamW on all sides, besides LEARNING_RATE.
ADAMW: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 1e-5}


class PaddedMosaicBert(nn.Module):
    """The published implementation.

    Args:
        model: a MosaicBERT (ALiBi, gated MLP, post-LayerNorm); its weights are copied.
    """

    def __init__(self, model: BertForMaskedLM) -> None:
        super().__init__()
        self.config = model.config
        named = {
            name.replace(".", "/"): nn.Parameter(p.detach().clone())
            for name, p in model.named_parameters()
        }
        self.weights = nn.ParameterDict(named)
        self.register_buffer("slopes", torch.tensor(self.config.alibi_slopes), persistent=False)

    def forward(self, inputs: Mapping[str, Tensor], places: Tensor | None = None) -> Tensor:
        """Return the summed cross-entropy for Hugging Face's padded inputs, int64 [S, L].

        With the ``places`` of masked tokens among S L, int64 [M],
        the decoder runs only on these; labels are then [M].
        """
        word = self._weight("bert.embeddings.word_embeddings.weight")
        x_SLD = F.embedding(inputs["input_ids"], word)
        x_SLD = x_SLD + F.embedding(
            inputs["token_type_ids"], self._weight("bert.embeddings.token_type_embeddings.weight")
        )
        x_SLD = self._drop(self._norm("bert.embeddings", x_SLD))
        everywhere = torch.ones_like(inputs["input_ids"])
        bias = self._bias(inputs.get("attention_mask", everywhere), x_SLD.dtype)
        for index in range(self.config.num_hidden_layers):
            x_SLD = self._layer(f"bert.encoder.layer.{index}", x_SLD, bias)
        x_TD = x_SLD.flatten(0, 1)
        x_TD = x_TD if places is None else x_TD[places]
        x_TD = self._linear("cls.predictions.transform.dense", x_TD)
        x_TD = self._norm("cls.predictions.transform", self._gelu(x_TD))
        logits = F.linear(x_TD, word, self._weight("cls.predictions.bias"))[
            ..., : self.config.vocab_size
        ]
        labels = inputs["labels"].flatten()
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")

    def _layer(self, name: str, x: Tensor, bias: Tensor) -> Tensor:
        """Map [S, L, D] to [S, L, D]."""
        heads = (self.config.num_attention_heads, self.config.head_size)
        qkv = (
            self._linear(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value")
        )
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in qkv)  # [S, N, L, H]
        probability = self.config.attention_probs_dropout_prob if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), probability)
        context = self._linear(f"{name}.attention.output.dense", context.transpose(1, 2).flatten(2))
        x = self._norm(f"{name}.attention.output", x + self._drop(context))
        gate, value = F.linear(x, self._weight(f"{name}.intermediate.dense.weight")).chunk(
            2, dim=-1
        )
        inner = self._drop(self._gelu(gate) * value)
        return self._norm(f"{name}.output", x + self._linear(f"{name}.output.dense", inner))

    def _bias(self, attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias [S, N, L, L], materialized as in the published code."""
        place = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        distance = (place[None, :] - place[:, None]).abs()
        alibi = -self.get_buffer("slopes")[:, None, None] * distance
        masked = (1 - attention_mask[:, None, None, :]) * MASKED_SCORE
        return (alibi[None] + masked).to(dtype)

    def _weight(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self._weight(f"{name}.LayerNorm.{kind}") for kind in ("weight", "bias"))
        return F.layer_norm(x, (self.config.hidden_size,), weight, bias, self.config.layer_norm_eps)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.hidden_dropout_prob, self.training)

    def _gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="none" if self.config.exact_gelu else "tanh")


def our_side(batch: HostBatch, model: BertForMaskedLM, seed: int) -> Side:
    """Return our model with the step used in training; moves its weights into a flat buffer."""
    flat = FlatParameters(model.ordered_parameters())
    layout = ShardLayout.whole(flat.numel)
    optimizer = DecoupledAdamW(flat, layout, base_lr=LEARNING_RATE, max_grad_norm=None, **ADAMW)
    return trained_side(batch, model, seed, optimizer, MaskedLM("step"))


Part = tuple[Mapping[str, Tensor], Tensor | None]  # arguments of `PaddedMosaicBert.forward`


def padded_side(batch: HostBatch, start: BertForMaskedLM, length: int) -> Side:
    """Return the published model with the same weights and texts, padded to ``length``."""
    device = next(start.parameters()).device
    inputs = {
        name: value.to(device) for name, value in padded_inputs(batch.to("cpu"), length).items()
    }
    return _side("padded", batch, start, [(inputs, None)], fused=None)


def expert_side(batch: HostBatch, start: BertForMaskedLM, number: int) -> Side:
    """Return the expert's version with ``number`` groups of texts of similar length."""
    groups = make_groups(batch, number, next(start.parameters()).device)
    parts: list[Part] = [
        ({**group.encoder, "labels": group.labels}, group.places) for group in groups
    ]
    return _side("expert", batch, start, parts, fused=True)


def _side(
    name: str, batch: HostBatch, start: BertForMaskedLM, parts: Sequence[Part], fused: bool | None
) -> Side:
    device = next(start.parameters()).device
    model = PaddedMosaicBert(start).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused, **ADAMW)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=start.dtype == torch.bfloat16):
                loss = model(*part) / batch.num_masked
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return Side(name, step)


def fastest_expert(batch: HostBatch, start: BertForMaskedLM) -> tuple[Side, dict[int, float]]:
    """Return the expert's step with the fastest number of groups,
    and the median seconds for each number.
    """
    trials = {
        number: statistics.median(alternate([expert_side(batch, start, number)], TRIALS)["expert"])
        for number in GROUPS
        if number <= batch.num_samples
    }
    return expert_side(batch, start, min(trials, key=trials.__getitem__)), trials


def run(
    config: BertConfig,
    batch: HostBatch,
    length: int,
    pairs: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> dict[str, Any]:
    """Run the benchmark and return a JSON-able record; times in seconds.

    Args:
        config: shape of a MosaicBERT.
        batch: sequences of at most ``length`` tokens.
        length: length that the published side pads to, tokens.
        pairs: measured steps per side, alternating.
        dtype: dtype of the matrix products on both sides.
        device: where to compute.
        seed: seed of weights and dropout.
    """
    implementations = ops.select("auto", device)
    model = BertForMaskedLM(config, dtype)
    model.initialize(seed)
    model = model.to(device)
    padded = padded_side(batch, model, length)  # first: these copy the weights
    expert, trials = fastest_expert(batch, model)
    seconds = alternate([our_side(batch, model, seed), padded, expert], pairs)
    return {
        **common_record(config, batch, dtype, device, implementations),
        **pair_ratios(seconds["mlbert"], seconds["padded"]),
        "expert": {
            **pair_ratios(seconds["mlbert"], seconds["expert"]),
            "seconds_by_groups": trials,
        },
        "padded_to": length,
        "padded_tokens": batch.num_samples * length,
        "sides": {
            name: {"seconds": times, "median_seconds": statistics.median(times)}
            for name, times in seconds.items()
        },
    }


def first_texts(
    folder: Path, tokenizer: str, sequences: int, length: int, rate: float, seed: int
) -> HostBatch:
    """Return the first ``sequences`` texts of a shuffled MDS data set,
    with a fraction ``rate`` of their tokens masked.

    Each text is truncated to ``length`` tokens, as in the published loader.
    """
    source = TextSource(
        TextSet(streams_of("", None, folder), load_tokenizer(tokenizer), length, TRUNCATE),
        sequences_per_step=sequences,
        shuffle="py1s",
        shuffle_seed=seed,
        canonical_nodes=1,
        rate=lambda _: rate,
        seed=seed,
    )
    source.open()
    batch = source.batches_of(0)[0]
    source.close()
    return batch


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description="Time a MosaicBERT step, ours against other implementations."
    )
    parser.add_argument("--data", type=Path, required=True, help="MDS data set of texts")
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help="shape with ALiBi and a gated MLP"
    )
    parser.add_argument(
        "--length", type=int, default=128, help="maximum length, to which the published side pads"
    )
    parser.add_argument("--sequences", type=int, default=16, help="texts per batch")
    parser.add_argument("--rate", type=float, default=0.3, help="fraction of tokens to predict")
    parser.add_argument("--pairs", type=int, default=5, help="timed steps per side")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--tokenizer", default="bert-base-uncased", help="a vocab.txt or a model's name"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, masks and dropout")
    parser.add_argument("--json", type=Path, help="file for the record")
    given = parser.parse_args()
    shape = BertConfig.from_json(given.config)
    if not shape.alibi_slopes or not shape.gated_mlp:
        parser.error(
            f"--config {given.config} is not a MosaicBERT config. "
            "Give one with ALiBi and a gated MLP."
        )
    if not 5 <= given.pairs <= 10_000:
        parser.error(f"--pairs {given.pairs} is out of range. Use 5 to 10000.")
    if given.length < 8 or given.sequences < 1 or not 0.01 <= given.rate <= 0.9:
        parser.error("--length must be at least 8, --sequences at least 1, and --rate 0.01 to 0.9.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = first_texts(
        given.data, given.tokenizer, given.sequences, given.length, given.rate, given.seed
    )
    dtype = compute_dtype(given.precision, device)
    record = run(shape, batch, given.length, given.pairs, dtype, device, given.seed)
    expert = record["expert"]["ratio"]
    print(
        f"ratio (median of pairs): padded to {given.length} {record['ratio']:.2f}, "
        f"an expert's {expert:.2f}"
    )
    if given.json:
        given.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
