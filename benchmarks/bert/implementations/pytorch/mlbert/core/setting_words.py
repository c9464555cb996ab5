"""What a setting is where nobody gives it, and what others call it: words for help, errors and documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mlbert.core.errors import UserError
from mlbert.core.setting import Setting
from mlbert.core.settings import train_settings

REQUIRED = "required"
_STEPS = "a run's length is told in steps"
# Flags of transformers' examples and of other trainers, without dashes, underscores and case: what gives the same here,
# a field or field=value, and what to know about it.
_OTHERS: Mapping[str, tuple[str, str]] = {
    "lr": ("learning_rate", ""),
    "baselr": ("learning_rate", ""),
    "epochs": ("max_steps", _STEPS),
    "numepochs": ("max_steps", _STEPS),
    "numtrainepochs": ("max_steps", _STEPS),
    "maxepochs": ("max_steps", _STEPS),
    "steps": ("max_steps", ""),
    "trainsteps": ("max_steps", ""),
    "numtrainsteps": ("max_steps", ""),
    "reportto": ("tensorboard_dir", "for Weights & Biases --wandb_project"),
    "loggingdir": ("tensorboard_dir", ""),
    "tensorboard": ("tensorboard_dir", ""),
    "wandb": ("wandb_project", ""),
    "bf16": ("precision=bf16", ""),
    "fp16": ("precision=fp16", ""),
    "fp8": ("precision=fp8", ""),
    "amp": ("precision=bf16", ""),
    "mixedprecision": ("precision=bf16", ""),
    "dtype": ("precision", ""),
    "perdevicetrainbatchsize": ("train_batch_size", ""),
    "pergputrainbatchsize": ("train_batch_size", ""),
    "perdeviceevalbatchsize": ("eval_batch_size", ""),
    "batchsize": ("train_batch_size", "of each rank"),
    "bs": ("train_batch_size", "of each rank"),
    "gradaccumsteps": ("gradient_accumulation_steps", ""),
    "accumulategradbatches": ("gradient_accumulation_steps", ""),
    "outdir": ("output_dir", ""),
    "out": ("output_dir", ""),
    "savedir": ("output_dir", ""),
    "modelnameorpath": ("init_checkpoint", "the shape is --bert_config_file"),
    "model": ("init_checkpoint", "the shape is --bert_config_file"),
    "configname": ("bert_config_file", ""),
    "tokenizername": ("tokenizer", ""),
    "trainfile": ("input_dir", ""),
    "datadir": ("input_dir", ""),
    "dataset": ("input_dir", ""),
    "datasetname": ("input_dir", ""),
    "validationfile": ("eval_dir", ""),
    "evalfile": ("eval_dir", ""),
    "blocksize": ("max_seq_length", ""),
    "maxlength": ("max_seq_length", ""),
    "seqlen": ("max_seq_length", ""),
    "mlmprobability": ("masking_rate", ""),
    "weightdecay": ("weight_decay_rate", ""),
    "wd": ("weight_decay_rate", ""),
    "adambeta1": ("opt_lamb_beta_1", ""),
    "beta1": ("opt_lamb_beta_1", ""),
    "adambeta2": ("opt_lamb_beta_2", ""),
    "beta2": ("opt_lamb_beta_2", ""),
    "adamepsilon": ("opt_epsilon", ""),
    "eps": ("opt_epsilon", ""),
    "optim": ("optimizer", ""),
    "lrschedulertype": ("schedule", ""),
    "scheduler": ("schedule", ""),
    "warmupratio": ("warmup_proportion", ""),
    "gradclip": ("max_grad_norm", ""),
    "clipgradnorm": ("max_grad_norm", ""),
    "randomseed": ("seed", ""),
    "loggingsteps": ("log_freq", ""),
    "evalsteps": ("eval_iter_samples", "counted in sequences"),
    "savesteps": ("save_checkpoint_steps", ""),
    "savetotallimit": ("keep_checkpoints", ""),
    "resumefromcheckpoint": ("resume", "of LOGDIR, the newest"),
    "numthreads": ("cpu_threads", ""),
    "threads": ("cpu_threads", ""),
    "maxtime": ("max_seconds", ""),
}


def hint_at(shape: str) -> str | None:
    """What to say of another program's word, given without dashes, underscores and case; None: it is none of theirs."""
    if shape not in _OTHERS:
        return None
    (name, _, value), note = _OTHERS[shape][0].partition("="), _OTHERS[shape][1]
    row = train_settings()[name]
    words = f"Write {row.flag} {value} here" if value else f"It is called {row.flag} here"
    return f"{words} (export {row.env}{f'={value}' if value else ''}){f'; {note}' if note else ''}"


def missing(rows: Sequence[Setting], config_file: str) -> UserError:
    """The error for settings that nobody gave, all in one line."""
    if len(rows) == 1:
        row = rows[0]
        place = f"Add 'export {row.env}=...' to {config_file}" if config_file else f"Export it, or give {row.flag}"
        meaning = row.meaning.rstrip(".")
        return UserError(row.env, f"is not set ({meaning[0].lower()}{meaning[1:]})", place)
    names = ", ".join(f"{row.env} ({row.flag})" for row in rows)
    place = (
        f"Add an export of each to {config_file}" if config_file else "Source a config_<system>.sh, or give the flags"
    )
    return UserError(names, f"are not set, all {len(rows)} are required", f"{place}; mlbert train --help explains them")


def default_words(row: Setting, recipes: Mapping[str, Mapping[str, object]]) -> str:
    """What a row is where nobody gives it: ``1; packed_lamb: 3``; "required" where somebody has to.

    Args:
        row: of the table.
        recipes: name to defaults.
    """
    if row.name == "recipe":
        return REQUIRED
    absent = "none" if row.optional else REQUIRED
    texts = {
        recipe: value_words(defaults[row.name]) if row.name in defaults else absent
        for recipe, defaults in recipes.items()
    }
    most = Counter(texts.values()).most_common(1)[0][0]
    return "; ".join([most, *(f"{recipe}: {text}" for recipe, text in texts.items() if text != most)])


def value_words(value: object) -> str:
    """A value as people write it: none, yes, no."""
    if value is None:
        return "none"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def markdown_table(recipes: Mapping[str, Mapping[str, object]], launchers: Sequence[tuple[Setting, str]]) -> str:
    """The whole table in Markdown, for the documentation.

    Args:
        recipes: name to defaults.
        launchers: rows that only launchers read, each with its default.
    """
    lines = ["| variable | flag and YAML key | type | default | unit | meaning |", "|---|---|---|---|---|---|"]
    rows = [(row, f"`{row.flag}`", default_words(row, recipes)) for row in train_settings().values()]
    for one, flag, default in [*rows, *((row, "launchers only", default) for row, default in launchers)]:
        kind = one.type_name.replace("|", "\\|")
        lines.append(f"| `{one.env}` | {flag} | {kind} | {default} | {one.unit} | {one.meaning} |")
    return "\n".join(lines) + "\n"
