"""Settings of the evaluations, and of a run that is one phase of several."""

from __future__ import annotations

from mlbert.config.section import Ranges, Section, fixed_setting, setting


class EvaluationConfig(Section):
    """When and on what the model is evaluated, and the target."""

    target_metric: float | None = setting(
        "TARGET_MLM_ACCURACY",
        "Masked-token accuracy, or a task's metric, at which the run succeeds; "
        "none: it succeeds at its limit.",
        key="target_mlm_accuracy",
        default=0.72,
        **Ranges.PROBABILITY,
    )
    num_eval_examples: int | None = setting(
        "NUM_EVAL_EXAMPLES",
        "Number of evaluation sequences; none uses all of them.",
        default=10000,
        **Ranges.SAMPLES,
    )
    eval_batch_size: int = setting(
        "EVAL_BATCH_SIZE",
        "Packs in one evaluation batch.",
        default=16,
        unit="packs per rank",
        **Ranges.PACKS,
    )
    eval_iter_start_samples: int = setting(
        "EVAL_ITER_START_SAMPLES",
        "Training sequences before the first evaluation.",
        **Ranges.SAMPLES,
    )
    eval_iter_samples: int = setting(
        "EVAL_ITER_SAMPLES", "Training sequences between evaluations.", **Ranges.SAMPLES
    )
    eval_iter_steps: int | None = setting(
        "EVAL_ITER_STEPS",
        "Steps between evaluations; replaces EVAL_ITER_START_SAMPLES and EVAL_ITER_SAMPLES.",
        default=None,
        **Ranges.STEPS,
    )


class PhaseConfig(Section):
    """A run that is one phase of several: how it starts from the one before, and its length."""

    init_optimizer: str | None = setting(
        "INIT_OPTIMIZER",
        "Run or checkpoint whose optimizer state the run starts with; none starts at zero.",
        default=None,
    )
    extend_context: bool = setting(
        "EXTEND_CONTEXT",
        "Accept starting weights with a different rotary base from BERT_CONFIG's.",
        default=False,
    )
    step_tokens: int | None = fixed_setting(
        "STEP_TOKENS",
        "Tokens without padding that count as one step in MAX_STEPS, BATCHSIZE_WARMUP_STEPS and "
        "the schedule; the last checkpoint is then kept for the next phase. none counts steps.",
        default=None,
        unit="tokens",
        ge=1,
        le=10**12,
    )
