"""Texts about settings for help, errors and documentation, including other programs' names for a setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mlbert.config.recipe import Recipe
from mlbert.config.section import Setting
from mlbert.config.sections import settings_by_key
from mlbert.host.errors import UserError, hide_credentials, name_shape, nearest

REQUIRED = "required"
_STEPS = "run length is in steps"
# Flags of transformers' examples and of other trainers, without dashes, underscores and case: our setting as key or
# key=value, and a note.
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
    "batchsize": ("train_batch_size", "per rank"),
    "bs": ("train_batch_size", "per rank"),
    "gradaccumsteps": ("gradient_accumulation_steps", ""),
    "accumulategradbatches": ("gradient_accumulation_steps", ""),
    "outdir": ("output_dir", ""),
    "out": ("output_dir", ""),
    "savedir": ("output_dir", ""),
    "modelnameorpath": ("init_checkpoint", "the model shape is --bert_config_file"),
    "model": ("init_checkpoint", "the model shape is --bert_config_file"),
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
    "resumefromcheckpoint": ("resume", "from the newest checkpoint in LOGDIR"),
    "numthreads": ("cpu_threads", ""),
    "threads": ("cpu_threads", ""),
    "maxtime": ("max_seconds", ""),
}


def hint_at(shape: str) -> str | None:
    """Return advice about another program's name for a setting, given as `name_shape`; None if it is unknown."""
    if shape not in _OTHERS:
        return None
    (key, _, value), note = _OTHERS[shape][0].partition("="), _OTHERS[shape][1]
    setting = settings_by_key()[key]
    words = f"Write {setting.flag} {value} here" if value else f"It is called {setting.flag} here"
    return f"{words} (export {setting.env}{f'={value}' if value else ''}){f'; {note}' if note else ''}"


def unknown_name(name: str, what: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, suggesting our name for it or the nearest known one."""
    near = nearest(name, known)
    theirs = hint_at(name_shape(name))
    if theirs and (near is None or name_shape(near) != name_shape(name)):
        return UserError("config.unknown-name", name, f"is an unknown {what}", theirs)
    hint = f"The nearest known one is {near}" if near else "See mlbert train --help for the known ones"
    return UserError("config.unknown-name", name, f"is an unknown {what}", hint)


def missing(absent: Sequence[Setting], config_file: str) -> UserError:
    """Return one error that lists all missing settings."""
    if len(absent) == 1:
        one = absent[0]
        place = f"Add 'export {one.env}=...' to {config_file}" if config_file else f"Export it, or give {one.flag}"
        meaning = one.meaning.rstrip(".")
        return UserError("config.missing", one.env, f"is not set ({meaning[0].lower()}{meaning[1:]})", place)
    names = ", ".join(f"{one.env} ({one.flag})" for one in absent)
    place = (
        f"Add an export of each to {config_file}" if config_file else "Source a config_<system>.sh, or give the flags"
    )
    problem = f"are not set, all {len(absent)} are required"
    return UserError("config.missing", names, problem, f"{place}; mlbert train --help explains them")


def default_words(setting: Setting, recipes: Iterable[Recipe]) -> str:
    """Return a setting's default in words: ``1; packed_lamb: 3``, or "required".

    Recipes that do not have the setting's section are not mentioned.
    """
    if setting.key == "recipe":
        return REQUIRED
    texts = {
        recipe.name: REQUIRED if recipe.requires(setting) else value_words(recipe.default(setting))
        for recipe in recipes
        if setting.section in recipe.sections
    }
    most = Counter(texts.values()).most_common(1)[0][0]
    return "; ".join([most, *(f"{name}: {text}" for name, text in texts.items() if text != most)])


def value_words(value: object) -> str:
    """Return a value as users write it: none, yes, no. Secrets in addresses are masked."""
    if value is None:
        return "none"
    return ("no", "yes")[value] if isinstance(value, bool) else hide_credentials(str(value))
