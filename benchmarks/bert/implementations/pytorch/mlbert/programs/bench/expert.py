"""The fastest step that an expert gets out of Hugging Face's BERT on the same sequences:
the strongest opponent.

`transformers.BertForPreTraining` with its own layers, but: the sequences are sorted by length and
run in small groups, each padded to its own longest one; only masked positions go through the
masked-LM head; the optimizer is ``torch.optim.AdamW(fused=True)``. What is best depends on the
processor, so it is measured, one choice after the other: the size of the groups, SDPA or eager
attention, and ``torch.compile``.

Legend: S sequences, M masked tokens, G sequences of a group, W padded length of a group.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import IGNORED_LABEL, HostBatch
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.huggingface import padded_inputs
from mlbert.programs.bench.sides import LEARNING_RATE, Side, alternate, peer_model

TRIALS = 3  # measured steps of each choice
GROUPS = (1, 2, 4, 8)  # numbers of groups that are tried
_COMPILED = (False, True)


@dataclass(frozen=True)
class Choice:
    """One form of the step.

    Attributes:
        groups: number of groups of sequences of similar length.
        attention: ``attn_implementation`` of transformers.
        compiled: whether each layer runs under ``torch.compile``, with one graph for each width of
            the groups. Compiling the model as a whole takes several minutes.
    """

    groups: int
    attention: str = "sdpa"
    compiled: bool = False


@dataclass(frozen=True)
class _Group:
    """Inputs of a few sequences, int64 [G, W].

    Attributes:
        encoder: arguments of ``BertModel.forward``; without a mask if no sequence is padded.
        places: of the masked tokens among G W, int64 [masked tokens of the group].
        labels: of the masked tokens.
        next_sentence: labels, int64 [G].
    """

    encoder: dict[str, Tensor]
    places: Tensor
    labels: Tensor
    next_sentence: Tensor


def make_groups(batch: HostBatch, number: int, device: torch.device) -> list[_Group]:
    """Cut a batch, sorted by length, into ``number`` groups of equal size (the last one may be
    smaller).
    """
    inputs = {name: value.to(device) for name, value in padded_inputs(batch.to("cpu")).items()}
    lengths = inputs["attention_mask"].sum(1)
    groups = []
    for rows in lengths.argsort().split(-(-len(lengths) // number)):
        width = int(lengths[rows].max())
        part = {
            name: inputs[name][rows, :width].contiguous()
            for name in ("input_ids", "token_type_ids", "labels")
        }
        labels = part.pop("labels").flatten()
        if int(lengths[rows].min()) < width:
            part["attention_mask"] = inputs["attention_mask"][rows, :width].contiguous()
        places = torch.nonzero(labels != IGNORED_LABEL).flatten()
        groups.append(_Group(part, places, labels[places], inputs["next_sentence_label"][rows]))
    return groups


def expert_side(
    config: BertConfig,
    batch: HostBatch,
    dtype: torch.dtype,
    start: BertForPreTraining,
    choice: Choice,
) -> Side:
    """Return the step in one form, with the weights of ``start``."""
    device = next(start.parameters()).device
    model = peer_model(config, start, choice.attention)
    groups = make_groups(batch, choice.groups, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if choice.compiled:
        for layer in model.bert.encoder.layer:
            layer.compile(dynamic=False)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for group in groups:
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                of_masked, of_pairs = _loss_sums(model, group)
                loss = of_masked / batch.num_masked + of_pairs / batch.num_samples
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return Side("expert", step)


def _loss_sums(model: Any, group: _Group) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropies of the masked tokens and of the sentence pairs."""
    hidden, pooled = model.bert(**group.encoder, return_dict=False)
    tokens = model.cls.predictions(hidden.flatten(0, 1)[group.places])
    pairs = model.cls.seq_relationship(pooled)
    return (
        F.cross_entropy(tokens.float(), group.labels, reduction="sum"),
        F.cross_entropy(pairs.float(), group.next_sentence, reduction="sum"),
    )


def fastest_side(
    config: BertConfig, batch: HostBatch, dtype: torch.dtype, start: BertForPreTraining
) -> tuple[Side, dict[str, object]]:
    """Return the fastest form of the step, and a JSON-able record of the choice
    and of the seconds of each trial.
    """
    choice = Choice(1)
    trials = dict[Choice, float]()

    def seconds(tried: Choice) -> float:
        if tried not in trials:
            side = expert_side(config, batch, dtype, start, tried)
            try:
                trials[tried] = statistics.median(alternate([side], TRIALS)[side.name])
            except Exception:  # the compiler needs g++, and raises many types
                if not tried.compiled:
                    raise
                return math.inf
        return trials[tried]

    numbers = sorted({min(number, batch.num_samples) for number in GROUPS})
    choice = min((replace(choice, groups=number) for number in numbers), key=seconds)
    choice = min((replace(choice, attention=kind) for kind in ("sdpa", "eager")), key=seconds)
    choice = min((replace(choice, compiled=value) for value in _COMPILED), key=seconds)
    measured = [{**asdict(tried), "seconds": median} for tried, median in trials.items()]
    return expert_side(config, batch, dtype, start, choice), {
        "choice": asdict(choice),
        "trials": measured,
    }
