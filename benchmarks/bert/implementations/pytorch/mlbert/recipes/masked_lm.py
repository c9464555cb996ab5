"""Masked-LM only, MosaicML's way: the entries to MLPerf Training v2.1 (open division), and MosaicBERT on text.

    benchmarks/bert/implementations/composer/run_and_time.sh -c methods      (or: mlbert train --config config.yaml)
    python benchmarks/mosaic_bert/main.py yamls/main/mosaic-bert-base-uncased.yaml

* model      MODEL_IMPLEMENTATION: our unpadded encoder, or Hugging Face's padded one; no pooler, no next-sentence head
* loss       mean over all masked tokens of the step; next-sentence labels are not read
* update     decoupled AdamW with decay on every tensor (DECAY_ALL); the gradient is not clipped
* rate       a ramp, then a multiplier for each milestone passed; the second update repeats the first one's rate, 0, as
             Composer's schedulers do (LR_FIRST_STEP=-1)
* data       samples that were masked when they were made, one sequence a row; or, with a TOKENIZER, texts that are
             tokenised ahead of need, cut into sequences and masked anew at MASKING_RATE each time they are read

Dropout is the shape's: MODEL_OPTIONS switches it off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from mlbert.core import schedules
from mlbert.core.bert_config import BertConfig
from mlbert.core.continuing import fixed_settings
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.groups import exchange_group
from mlbert.dist.world import World
from mlbert.feed import inputs, text_run
from mlbert.feed.budget import Budget
from mlbert.feed.inputs import PreTrainingInputs
from mlbert.feed.pretraining import budget_of, make_evaluation_set, make_source
from mlbert.models import evaluation
from mlbert.models.bert import AnyBert
from mlbert.models.choose import make_masked_lm
from mlbert.models.export import write_weights
from mlbert.models.foreign import write_composer
from mlbert.models.huggingface import to_huggingface
from mlbert.models.neighbours import begin_with_frequencies
from mlbert.models.objectives import MaskedLM
from mlbert.models.start import choose_compute, start_weights
from mlbert.models.update import whole_update
from mlbert.optim.loss_scale import LossScale
from mlbert.train.protocols import EvaluationSet, Method, Source

__all__ = ["DEFAULTS", "build", "build_evaluation", "inspect"]

DEFAULTS: Mapping[str, object] = {
    "recipe": "masked_lm",
    "model_implementation": "mlbert",
    "model_options": None,
    "data_reader": "auto",
    "init_checkpoint": None,
    "gradient_accumulation_steps": 1,
    "average_packing_rate": 1.0,
    "max_sequences_per_pack": 1,
    "bin_counts": None,
    "exchange_padding": "off",
    "exchange_by": "lengths",
    "max_seconds": None,
    "warmup_steps": 0,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "schedule": "multistep",
    "poly_power": 1.0,
    "end_lr": None,
    "lr_decay_end": None,
    "lr_decay_steps": None,
    "lr_milestones": None,
    "lr_gamma": None,
    "lr_first_step": -1,
    "optimizer": "decoupled_adamw",
    "opt_epsilon": 1e-6,
    "decay_all": True,
    "max_grad_norm": None,
    "gradient_clipping": "after",
    "gradient_reduction": "fp32",
    "bucket_mib": 25,
    "optimizer_implementation": "ops",
    "sharded_optimizer": "off",
    "weights_allgather": "fp32",
    "seed": None,
    "target_mlm_accuracy": 0.720,
    "num_eval_examples": 10_000,
    "eval_batch_size": 16,
    "precision": "auto",
    "fp8_fast_accumulation": "forward",
    "loss_scale": 131072.0,
    "loss_scale_window": 2000,
    "join_timeout": None,
    "cpu_threads": None,
    "ops": "auto",
    "cuda_graph_mode": "none",
    "save_checkpoint_steps": 0,
    "keep_checkpoints": 2,
    "resume": False,
    "max_skipped_steps": 20,
    "synthetic_data": False,
    "log_freq": 10,
    "experiment": 0,
    "caches_cleared": False,
    "submission_org": "unspecified",
    "submission_platform": "unspecified",
    "submission_division": "open",
}


def inspect(config: TrainConfig) -> PreTrainingInputs:
    """Looks at the inputs; see `mlbert.feed.inputs.inspect` and `mlbert.feed.text_run.inspect`. Raises UserError
    besides: Hugging Face's model is to pad stored samples beyond its positions."""
    if config.tokenizer is not None:
        return text_run.inspect(config)
    found = inputs.inspect(config)
    if (config.max_seq_length or 0) > (positions := found.shape.max_position_embeddings):
        subject = f"MAX_SEQ_LENGTH={config.max_seq_length}"
        raise UserError(subject, f"is more than the model's {positions} positions", "Set none, or fewer")
    return found


def build(
    config: TrainConfig, found: PreTrainingInputs, world: World, seed: int, warn: Callable[[str], None]
) -> Method:
    """The method's objects. Nothing of the data sets is touched before their ``open``, but that a model of ModernBERT's
    form starts with the frequencies of words in the first training texts."""
    compute = choose_compute(config, world.device, warn)
    model = start_weights(make_masked_lm(config, found.shape, compute), config, seed, world.device, warn)
    if found.shape.is_rotary and config.tokenizer is not None and config.init_checkpoint is None:
        begin_with_frequencies(model, text_run.token_counts(config))
    loss_scale = LossScale.of(config, world.device)
    flat, optimizer, sync = whole_update(config, model, world, loss_scale)
    source, samples, budget = _data(config, found.shape, world, seed)
    return Method(
        model=model,
        objective=MaskedLM(scope="step"),
        source=source,
        evaluation=samples,
        flat=flat,
        sync=sync,
        optimizer=optimizer,
        schedule=schedules.make(config),
        budget=budget,
        precision=compute.precision,
        ops=compute.ops,
        identity={
            "model": found.shape.to_json(),
            "model_implementation": config.model_implementation,
            "optimizer": optimizer.name,
            "global_batch_size": config.train_batch_size * world.world_size,  # on however many ranks
            "train_data": found.train_data,
            "eval_data": found.eval_data,
            **fixed_settings(config),
        },
        export=functools.partial(_export, config, model, found.vocabulary),
        loss_scale=loss_scale,
    )


def _export(
    config: TrainConfig, model: AnyBert, vocabulary: Path | None, folder: Path, facts: Mapping[str, object]
) -> None:
    """What `write_weights` does; of a run on text also LOGDIR/latest-rank0.pt, which Composer's programs start from,
    where they have such a model."""
    write_weights(model, folder, facts, vocabulary)
    if config.tokenizer is not None and not model.config.is_rotary:
        write_composer(to_huggingface(model), model.config, config.output_dir / "latest-rank0.pt")


def build_evaluation(
    config: TrainConfig, world: World, seed: int, warn: Callable[[str], None]
) -> tuple[AnyBert, MaskedLM, EvaluationSet]:
    """See `mlbert.models.evaluation.build_evaluation`."""
    if config.tokenizer is None:
        return evaluation.build_evaluation(config, world, seed, warn, make_masked_lm, MaskedLM)
    shape = text_run.inspect(config).shape
    samples = text_run.make_evaluation_set(config, rank=world.rank, world_size=world.world_size)
    model = make_masked_lm(config, shape, choose_compute(config, world.device, warn))
    return start_weights(model, config, seed, world.device, warn), MaskedLM(scope="step"), samples


def _data(config: TrainConfig, shape: BertConfig, world: World, seed: int) -> tuple[Source, EvaluationSet, Budget]:
    """Training batches, evaluation samples, and what a micro-batch holds at most."""
    place = {"rank": world.rank, "world_size": world.world_size}
    if config.tokenizer is not None:
        text_source = text_run.make_source(config, **place, seed=seed)
        return text_source, text_run.make_evaluation_set(config, **place), text_run.budget_of(config)
    local = (world.local_rank, world.local_world_size)
    source = make_source(config, shape, **place, seed=seed, exchange=exchange_group(config, world), local=local)
    return source, make_evaluation_set(config, shape, **place, seed=seed), budget_of(config, source)
