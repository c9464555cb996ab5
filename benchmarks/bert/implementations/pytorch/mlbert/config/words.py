"""Texts about settings for help, errors and documentation,
including other programs' names for a setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mlbert.config.configuration import Catalog
from mlbert.config.recipe import Recipe
from mlbert.config.section import Setting
from mlbert.host.errors import UserError, hide_credentials, name_shape, nearest

REQUIRED = "required"
# Our setting as key or key=value, a note, and its names in the examples of transformers and in
# other trainers: without dashes, underscores and case.
_NAMES_ELSEWHERE = (
    ("learning_rate", "", "lr baselr"),
    ("max_steps", "run length is in steps", "epochs numepochs numtrainepochs maxepochs"),
    ("max_steps", "", "steps trainsteps numtrainsteps"),
    ("tensorboard_dir", "for Weights & Biases --wandb-project", "reportto"),
    ("tensorboard_dir", "", "loggingdir tensorboard"),
    ("wandb_project", "", "wandb"),
    ("mlflow_experiment", "", "mlflow mlflowexperimentname"),
    ("precision=bf16", "", "bf16 amp mixedprecision"),
    ("precision=fp16", "", "fp16"),
    ("precision=fp8", "", "fp8"),
    ("precision", "", "dtype"),
    ("train_batch_size", "", "perdevicetrainbatchsize pergputrainbatchsize"),
    ("eval_batch_size", "", "perdeviceevalbatchsize"),
    ("train_batch_size", "per rank", "batchsize bs"),
    ("gradient_accumulation_steps", "", "gradaccumsteps accumulategradbatches"),
    ("output_dir", "", "outdir out savedir"),
    ("init_checkpoint", "the model shape is --bert-config-file", "modelnameorpath model"),
    ("bert_config_file", "", "configname"),
    ("tokenizer", "", "tokenizername"),
    ("input_dir", "", "trainfile datadir dataset datasetname"),
    ("eval_dir", "", "validationfile evalfile"),
    ("max_seq_length", "", "blocksize maxlength seqlen"),
    ("masking_rate", "", "mlmprobability"),
    ("weight_decay_rate", "", "weightdecay wd"),
    ("opt_lamb_beta_1", "", "adambeta1 beta1"),
    ("opt_lamb_beta_2", "", "adambeta2 beta2"),
    ("opt_epsilon", "", "adamepsilon eps"),
    ("optimizer", "", "optim"),
    ("schedule", "", "lrschedulertype scheduler"),
    ("warmup_proportion", "", "warmupratio"),
    ("max_grad_norm", "", "gradclip clipgradnorm"),
    ("seed", "", "randomseed"),
    ("log_freq", "", "loggingsteps"),
    ("eval_iter_samples", "counted in sequences", "evalsteps"),
    ("save_checkpoint_steps", "", "savesteps"),
    ("keep_checkpoints", "", "savetotallimit"),
    ("resume", "from the newest checkpoint in LOGDIR", "resumefromcheckpoint"),
    ("cpu_threads", "", "numthreads threads"),
    ("max_seconds", "", "maxtime"),
)
# Former settings, and why they are gone.
REMOVED = {"EXCHANGE_BY": "both of its values gave the same batches"}
_OTHERS = {name: (ours, note) for ours, note, names in _NAMES_ELSEWHERE for name in names.split()}


def hint_at(catalog: Catalog, shape: str) -> str | None:
    """Return advice about another program's name for a setting, given as `name_shape`;
    None if it is unknown.
    """
    if shape not in _OTHERS:
        return None
    key, _, value = _OTHERS[shape][0].partition("=")
    note = _OTHERS[shape][1]
    setting = catalog.by_key[key]
    words = f"Write {setting.flag} {value} here" if value else f"It is called {setting.flag} here"
    return (
        f"{words} (export {setting.env}{f'={value}' if value else ''}){f'; {note}' if note else ''}"
    )


def unknown_name(catalog: Catalog, name: str, what: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, suggesting our name for it or the nearest known one."""
    near = nearest(name, known)
    theirs = hint_at(catalog, name_shape(name))
    if theirs and (near is None or name_shape(near) != name_shape(name)):
        return UserError("config.unknown-name", name, f"is an unknown {what}", theirs)
    hint = f"Did you mean {near}?" if near else "See mlbert train --help for the known ones"
    return UserError("config.unknown-name", name, f"is an unknown {what}", hint)


def missing(absent: Sequence[Setting], config_file: str) -> UserError:
    """Return one error that lists all missing settings."""
    if len(absent) == 1:
        one = absent[0]
        place = (
            f"Add 'export {one.env}=...' to {config_file}"
            if config_file
            else f"Export it, or give {one.flag}"
        )
        meaning = one.meaning.rstrip(".")
        return UserError(
            "config.missing", one.env, f"is not set ({meaning[0].lower()}{meaning[1:]})", place
        )
    names = ", ".join(f"{one.env} ({one.flag})" for one in absent)
    place = (
        f"Add an export of each to {config_file}"
        if config_file
        else "Source a config_<system>.sh, or give the flags"
    )
    problem = f"are not set, all {len(absent)} are required"
    return UserError(
        "config.missing", names, problem, f"{place}; mlbert train --help explains them"
    )


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
    if isinstance(value, bool):
        return "yes" if value else "no"
    return hide_credentials(str(value))
