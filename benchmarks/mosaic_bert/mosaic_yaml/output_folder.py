"""Decide what happens to a run that ``save_folder`` already holds:
it is continued, extended, replaced or kept.

| autoresume | save_overwrite | unfinished run | finished run |
|---|---|---|---|
| true, or not given | false | continued | extended if max_duration is longer, or an error |
| false | false | an error if it has checkpoints | an error |
| false, or not given | true | replaced | replaced |
| true | true | an error | an error |

These are Composer's rules, except that it takes false for an ``autoresume`` that is not given,
and starts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.runs.run_folder import RunFolder
from mosaic_yaml.nested_yaml import Leaves

_OR = "or use another save_folder"


@dataclass(frozen=True)
class OutputFolder:
    """Where a run writes, and what happens to the run that is there.

    Attributes:
        base: folder of the run folders.
        experiment: number of the run folder.
        resume: continue from the newest checkpoint; without one, start at step 0.
        extends: the run that is continued is finished.
        replaces: remove the run first.
        saves_last_step: save the last step's checkpoint, too, as Composer does.
    """

    base: Path
    experiment: int
    resume: bool
    extends: bool
    replaces: bool
    saves_last_step: bool


def find_output_folder(
    leaves: Leaves, max_steps: int, step_tokens: int | None = None
) -> OutputFolder:
    """Return the folder of a run of ``max_steps``, each of so many tokens unless ``step_tokens`` is
    None; nothing is changed.

    Raises:
        UserError: the folder contains a run that these names neither continue nor replace,
            or both names are true.
    """
    name = str(leaves.text("run_name", "bert").value)
    folder = leaves.optional_text("save_folder")
    autoresume = leaves.flag("autoresume", True)
    overwrite = leaves.flag("save_overwrite", False)
    is_given = leaves.is_given("autoresume")
    if is_given and autoresume.value and overwrite.value:
        reason = "save_overwrite and autoresume are both true"
        remedy = "Set one to false: autoresume continues a run, save_overwrite replaces it"
        raise UserError("config.conflict", overwrite.origin, reason, remedy)
    if folder is None:
        # Nothing must be kept, so a finished run of the same name gets a new folder next to it.
        base = Path("runs") / name
        experiment = next(i for i in range(10_000) if not RunFolder.at(base, i).is_finished)
        saves_last_step = False
    else:
        base = Path(folder.replace("{run_name}", name))
        experiment = 0
        saves_last_step = leaves.number("save_num_checkpoints_to_keep", -1).value != 0
    run = RunFolder.at(base, experiment)
    replaces = bool(overwrite.value and (run.is_finished or run.has_trained))
    if not replaces:
        _check_old_run(run, bool(autoresume.value), max_steps, step_tokens)
    return OutputFolder(
        base=base,
        experiment=experiment,
        resume=not replaces and (run.has_trained or (is_given and bool(autoresume.value))),
        extends=not replaces and run.is_finished,
        replaces=replaces,
        saves_last_step=saves_last_step,
    )


def _check_old_run(
    run: RunFolder, may_resume: bool, max_steps: int, step_tokens: int | None
) -> None:
    """Raise UserError if a run that is not to be replaced can neither be resumed nor started
    again.
    """
    steps = run.checkpoint_steps
    if not steps:
        if run.is_finished:
            reason = "contains a finished run without checkpoints, so it cannot be extended"
            remedy = f"Give save_overwrite=true to replace it, {_OR}"
            raise UserError("run.exists", run.folder, reason, remedy)
        return
    if not may_resume:
        reason = f"contains a run of {steps[-1]} steps, and autoresume is false"
        remedy = (
            "Give autoresume=true to continue it, "
            "save_overwrite=true and no autoresume to replace it"
        )
        raise UserError("run.exists", run.folder, reason, f"{remedy}, {_OR}")
    unit = "steps" if step_tokens is None else "tokens"
    trained = run.finished_count(unit)
    asked = max_steps * (step_tokens or 1)
    if trained is not None and asked <= trained:
        reason = f"contains a finished run of {trained} {unit}, and max_duration is {asked} {unit}"
        remedy = f"Raise max_duration to extend it, give save_overwrite=true to replace it, {_OR}"
        raise UserError("run.exists", run.folder, reason, remedy)
    if step_tokens is None and max_steps < steps[-1]:
        reason = f"has a checkpoint at step {steps[-1]}, and max_duration is {max_steps} steps"
        remedy = f"Raise max_duration, give save_overwrite=true to start again, {_OR}"
        raise UserError("run.other-settings", run.folder, reason, remedy)
