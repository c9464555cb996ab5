"""Plan a pre-training run on custom text: choose settings from text size, time and machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.config.recipe import MASKED_LM
from mlbert.config.resolution import Resolved
from mlbert.host.environment import environment
from mlbert.host.machine import threads_per_rank
from mlbert.host.texts import is_count
from mlbert.ops.peak import gemm_peak_flops
from mlbert.ops.precision import compute_dtype, small_model_precision
from mlbert.programs import pretrain_rules as rules
from mlbert.programs.custom_corpus.own_folder import OwnFolder
from mlbert.recipes import masked_lm_text
from mlbert.recipes.sections import resolve
from mlbert.runs.progress import NO_LIMIT, Pace

BYTES_A_TOKEN = 4  # approximate for English text
SHARE_OF_PEAK = 0.3  # of the measured GEMM rate; roughly what training reaches
CONTINUED = 0.1  # learning rate factor for an already trained model
SAVE_SECONDS = 60.0  # between checkpoints
EVALUATIONS = 8  # of a run
LEAST_EVALUATION_SECONDS = 1.0  # between evaluations
NEVER = 10**15  # samples
_ORIGIN = "mlbert pretrain"


@dataclass(frozen=True)
class CorpusPlan:
    """Decisions made before the text is read.

    Attributes:
        vocab_size: maximum entries of a newly trained tokenizer.
        length: tokens per sequence.
        settings: JSON-able setting by key.
        warmup, decay: fractions of the time over which the learning rate rises and falls.
        shape: values of bert_config.json; vocab_size is later set to the tokenizer's.
    """

    vocab_size: int
    length: int
    settings: Mapping[str, Any]
    warmup: float
    decay: float
    shape: Mapping[str, Any]

    def pace(self, seconds: float) -> Pace:
        """Return the timing of evaluations and checkpoints for a run of this length."""
        every = max(LEAST_EVALUATION_SECONDS, seconds / EVALUATIONS)
        return Pace(seconds, self.warmup, self.decay, every, SAVE_SECONDS)


def make_plan(
    num_bytes: int, seconds: float, size: str, start: tuple[Path, BertConfig] | None
) -> CorpusPlan:
    """Choose settings for a text of ``num_bytes`` and a run of ``seconds`` on this machine.

    Args:
        start: folder and shape of a model to start from; None trains a new one of ``size``.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = cpu_threads()
    torch.set_num_threads(
        threads_per_rank(int(given) if is_count(given) else None, 1, is_gpu=device.type == "cuda")
    )
    precision = small_model_precision(device)
    speed = SHARE_OF_PEAK * gemm_peak_flops(compute_dtype(precision, device), device)
    choice = rules.choose(num_bytes // BYTES_A_TOKEN, seconds, size, speed)
    optimizer = choice.optimizer
    rate = choice.learning_rate
    length = rules.SEQUENCE_LENGTH
    shape = choice.shape.config(choice.shape.vocabulary)
    init: str | None = None
    if start is not None:
        folder, shape = start
        init = str(folder.resolve())
        length = min(length, shape.max_position_embeddings)
        optimizer = "stableadamw"
        rate = CONTINUED * rules.learning_rate(optimizer, shape.hidden_size)
    settings = {
        "recipe": MASKED_LM,
        "precision": "auto",
        "init_checkpoint": init,
        "max_seq_length": length,
        "train_batch_size": choice.sequences,
        "learning_rate": rate,
        "optimizer": optimizer,
        "opt_lamb_beta_1": rules.BETAS[0],
        "opt_lamb_beta_2": rules.BETAS[1],
        "opt_epsilon": rules.EPSILON,
        "weight_decay_rate": rules.WEIGHT_DECAY,
        "decay_all": False,
        "max_grad_norm": 1.0,
        "masking_rate": rules.MASK_RATE,
        "eval_masking_rate": rules.EVAL_MASK_RATE,
    }
    return CorpusPlan(
        vocab_size=choice.shape.vocabulary,
        length=length,
        settings=settings,
        warmup=choice.warmup / choice.updates,
        decay=choice.decay / choice.updates,
        shape=json.loads(shape.to_json()),
    )


def resolve_settings(
    folder: OwnFolder, settings: Mapping[str, Any], seconds: float, sequences: int, resume: bool
) -> Resolved:
    """Return the checked configuration of a run on prepared text.

    Args:
        settings: settings of the plan.
        seconds: total training time, including earlier calls.
        sequences: size of the training set, which the batch must not exceed.
        resume: resume from the newest checkpoint.
    """
    values = {
        **settings,
        "train_batch_size": min(settings["train_batch_size"], sequences),
        "shuffle_seed": 1,
        "seed": 1,
        "schedule": "constant",
        "lr_first_step": 1,
        "max_steps": NO_LIMIT,
        "max_seconds": seconds,
        "eval_batch_size": 32,
    }
    return resolve_on_text(folder, values, resume)


def resolve_on_text(folder: OwnFolder, values: Mapping[str, Any], resume: bool) -> Resolved:
    """Return the checked configuration of a run with ``values`` on the folder's prepared text."""
    of_every_run = {
        "recipe": MASKED_LM,
        "bert_config_file": folder.shape,
        "input_dir": folder.text / "train",
        "eval_dir": folder.text / "val",
        "eval_masking": "mask",
        "tokenizer": str(folder.text),
        "output_dir": folder.path,
        "long_texts": "truncate",
        "shuffle": "py1s",
        "canonical_nodes": 1,
        "max_samples_termination": NEVER,
        "eval_iter_start_samples": NEVER,
        "eval_iter_samples": NEVER,
        "target_mlm_accuracy": None,
        "num_eval_examples": None,
        "resume": resume,
    }
    layer = {name: (value, _ORIGIN) for name, value in {**of_every_run, **values}.items()}
    layer["cpu_threads"] = (cpu_threads(), "environment CPU_THREADS")
    return resolve(masked_lm_text.RECIPE, {}, given=layer)


def cpu_threads() -> str:
    """Return CPU_THREADS, the only setting that programs without a configuration read from the
    environment.
    """
    return environment().get("CPU_THREADS", "none").strip()


def num_processes() -> int:
    """Return the number of processes for work on this machine:
    CPU_THREADS, or one for each core.
    """
    given = cpu_threads()
    return threads_per_rank(int(given), 1) if is_count(given) else len(os.sched_getaffinity(0))
