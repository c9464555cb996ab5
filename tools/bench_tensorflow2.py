"""Compare the training step time of TensorFlow 2 (published form and ours) with PyTorch's reference
ops, in one run.

    python tools/bench_tensorflow2.py --config small --sequences 16 --pairs 7 --json FILE

All sides train on the same sequences, with lengths from Wikipedia's distribution, using LAMB in
float32. Their steps alternate, so that drift in machine speed affects all of them. TensorFlow's
variants:

    padded       one sequence per row, padded to the model's maximum length:
                 the published form and the default
    packed       several sequences per row with a block-diagonal mask (MAX_SEQUENCES_PER_PACK=3)
    + xla        the same with ENABLE_XLA=1

PyTorch runs on the flat token stream without padding, with reference ops (OPS=plain).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import numpy as np
import tensorflow as tf
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.batches import HostBatch
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading.synthetic import lengths_at, sequences
from mlbert.host.provenance import shipped
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.programs.bench.sides import LAMB, LEARNING_RATE, Side, alternate, our_side
from tf2_bert.model import BertPretrainer
from tf2_bert.optimizers import Lamb
from tf2_bert.step import TrainStep
from tf2_bert.store_rows import row_shape, rows_of

MAX_SEQUENCES_PER_PACK = 3


def tensorflow_side(
    name: str, config: BertConfig, ragged: Ragged, most: int, xla: bool, start: dict
) -> Side:
    """Return a step over rows of at most ``most`` sequences each;
    ``start`` has initial weights by our names.
    """
    tokens = config.max_position_embeddings
    packs = pack_lengths(ragged.lengths, tokens, most, seed=0)
    order = packs.order
    per_row = np.diff(packs.offsets)
    predictions = int(np.diff(ragged.masked_offsets).max())
    rows = rows_of(
        ragged.take(order), per_row, len(per_row), row_shape(tokens, most, tokens, predictions)
    )
    strategy = tf.distribute.get_strategy()
    model = BertPretrainer(config)
    model.assign(start)
    numbers = {"beta_1": LAMB["betas"][0], "beta_2": LAMB["betas"][1], "epsilon": LAMB["eps"]}
    optimizer = Lamb(
        model.parameters(),
        **numbers,
        weight_decay_rate=LAMB["weight_decay"],
        max_grad_norm=LAMB["max_grad_norm"],
        compiled=xla,
    )
    settings = TensorFlowConfig(enable_xla=xla, scale_loss=True)
    step = TrainStep(
        strategy,
        model,
        optimizer,
        None,
        settings,
        accumulation=1,
        gradient_clipping="before",
        seed=1,
    )
    batches = iter(tf.data.Dataset.from_tensors(rows).repeat())
    return Side(
        f"{name}: {len(per_row)} rows",
        lambda: float(step.run_loop(batches, [LEARNING_RATE], 0).losses[0]),
    )


def main() -> None:
    """Measure, print the medians and the ratios of each round, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="small", help="name of a shape in configs/")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7, help="timed steps per side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the record")
    words = parser.parse_args()
    config = BertConfig.from_json(shipped("configs") / f"{words.config}.json")
    lengths = lengths_at(
        (np.arange(words.sequences) + 0.5) / words.sequences, config.max_position_embeddings
    )
    ragged = sequences(lengths, config.vocab_size, np.random.default_rng(words.seed))
    ops.select("plain", torch.device("cpu"))
    peer = BertForPreTraining(config)
    peer.initialize(words.seed)
    start = {name: parameter.detach().numpy().copy() for name, parameter in peer.named_parameters()}
    batch = HostBatch.of_sequences(
        ragged, np.arange(words.sequences), config.max_position_embeddings
    )
    sides = [
        tensorflow_side("tensorflow padded", config, ragged, 1, False, start),
        tensorflow_side("tensorflow padded + xla", config, ragged, 1, True, start),
        tensorflow_side("tensorflow packed", config, ragged, MAX_SEQUENCES_PER_PACK, False, start),
        tensorflow_side(
            "tensorflow packed + xla", config, ragged, MAX_SEQUENCES_PER_PACK, True, start
        ),
        our_side(batch, peer, words.seed),
    ]
    sides[-1] = Side("pytorch, OPS=plain", sides[-1].step)
    seconds = alternate(sides, words.pairs)
    first = sides[0].name
    ratios = {
        name: [a / b for a, b in zip(seconds[first], times, strict=True)]
        for name, times in seconds.items()
    }
    record = {
        "config": words.config,
        "sequences": words.sequences,
        "tokens": int(lengths.sum()),
        "padded_tokens": words.sequences * config.max_position_embeddings,
        "tensorflow": tf.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "seconds": seconds,
        "times_as_fast_as_padded": ratios,
    }
    for name, times in seconds.items():
        print(
            f"{name:36} {statistics.median(times):8.4f} s   "
            f"{statistics.median(ratios[name]):5.2f} x",
            flush=True,
        )
    if words.json:
        words.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
