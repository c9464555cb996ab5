"""Packed texts on 1, 2 and 4 ranks: the loss is a mean over the tokens of all ranks,
however unequal their packs are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness import start_ranks
from mlbert.config.batch_growth import TokenGrowth
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.data.loading import text_run
from mlbert.data.loading.masked_text import TextSource
from mlbert.distributed.world import World
from mlbert.host.console import standard_output
from mlbert.host.environment import environment
from mlbert.training.experiment import RunOptions, run_experiment
from mosaic_texts import make_texts
from packed_text_run import packed_text_run
from training_settings import read_metrics, read_summary

ROWS = 8  # of a step, over all ranks
STEPS = 6
MOST_DIFFERENCE = 1e-6


class AllRanks:
    """A source for one rank: each step has the micro-batches of all ranks of another job."""

    def __init__(self, sources: Sequence[TextSource]) -> None:
        self._sources = sources
        self.is_preparing = False

    def open(self) -> None:
        for source in self._sources:
            source.open()

    def next_step(self) -> list[HostBatch]:
        return [batch for source in self._sources for batch in source.next_step()]

    def state_dict(self, back: int = 0) -> dict[str, Any]:
        return {}

    def finish(self) -> None:
        for source in self._sources:
            source.finish()

    def close(self) -> None:
        for source in self._sources:
            source.close()


def imitate(ranks: int) -> None:
    """Let this process, a run on one rank, read the batches of so many ranks."""
    make = text_run.make_source

    def make_all(data: Any, *arguments: Any, **options: Any) -> AllRanks:
        rows = data.train_batch_size // ranks
        part = data.model_copy(update={"train_batch_size": rows})
        text, corpus, growth, steps = arguments
        if isinstance(growth, TokenGrowth):
            growth = TokenGrowth(growth.first // ranks, rows, growth.tokens)
        else:
            assert growth.is_constant, "a growing batch takes one row more on each rank"
            growth = growth.constant(rows)
        sources = []
        for rank in range(ranks):
            place = {**options, "rank": rank, "world_size": ranks}
            sources.append(make(part, text, corpus, growth, steps, **place))
        return AllRanks(sources)

    text_run.make_source = make_all


def train(folder: str, out: str, ranks: int, imitated: int) -> None:
    """Train on ``ranks`` ranks, or on one with the batches of ``imitated`` ranks."""
    work = Path(folder)
    resolved = packed_text_run(
        work,
        out,
        train_batch_size=ROWS // ranks,
        shuffle="py1s",
        weight_decay_rate=1e-5,
        max_steps=STEPS,
    )
    if imitated > 1:
        imitate(imitated)
    world = World.identify(environment())
    run_experiment(resolved, world, standard_output(), RunOptions(mlperf_log=False))


def run(work: Path, out: str, ranks: int, imitated: int = 1) -> None:
    processes = start_ranks(train, (str(work), out, ranks, imitated), ranks, work)
    outputs = [process.communicate(200) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, outputs


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tree_root: Path) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    make_texts(folder, tree_root)
    shape = BertConfig(
        vocab_size=15,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_act="gelu_erf",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        position_embedding_type="rotary",
        norm_position="pre",
        gated_mlp=True,
        local_attention=8,
        global_attn_every_n_layers=3,
    )
    (folder / "bert_config.json").write_text(shape.to_json())
    return folder


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_packed_ranks_equal_one_rank_with_the_same_batch(work: Path, ranks: int) -> None:
    run(work, f"of_{ranks}", ranks)
    run(work, f"one_for_{ranks}", 1, imitated=ranks)
    several = work / f"of_{ranks}"
    one = work / f"one_for_{ranks}"
    for name in ("samples", "tokens", "steps"):
        assert read_summary(several)[name] == read_summary(one)[name]
    losses = [point["loss"] for point in read_metrics(several)]
    expected = [point["loss"] for point in read_metrics(one)]
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=MOST_DIFFERENCE)
    assert losses[-1] < losses[0]
    weights = load_file(several / "run_0/weights/model.safetensors")
    for tensor_name, tensor in load_file(one / "run_0/weights/model.safetensors").items():
        assert torch.allclose(weights[tensor_name], tensor, rtol=0, atol=1e-5), tensor_name
