"""Error codes with their exit status and one sentence of help; docs/errors.md is generated from this list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WRONG_INPUT = 2


class ErrorCode(NamedTuple):
    """Meaning of an error code."""

    help: str  # one sentence: what happened, and what usually helps
    exit_status: int = WRONG_INPUT


ERROR_CODES: Mapping[str, ErrorCode] = {
    # Settings: exports, flags, YAML keys, key=value words
    "config.ambiguous": ErrorCode("Several choices are possible, and none was named."),
    "config.choice": ErrorCode("The value is not one of the choices; the message lists them."),
    "config.conflict": ErrorCode("Two settings contradict each other, or do not apply together."),
    "config.duplicate": ErrorCode("The same name is given twice."),
    "config.file": ErrorCode("A configuration file cannot be parsed, or contains what it must not contain."),
    "config.missing": ErrorCode("A required setting or argument is missing."),
    "config.not-read": ErrorCode(
        "The chosen recipe does not read this setting; the message names the recipes that do."
    ),
    "config.range": ErrorCode("A number is outside its legal range."),
    "config.syntax": ErrorCode("A command-line argument is neither a flag nor name=value."),
    "config.unknown-name": ErrorCode("No setting, key or flag has this name; the message names the nearest one."),
    "config.unsupported": ErrorCode("The published program has this option, but this one does not support it."),
    "config.value": ErrorCode("The value has the wrong type or form."),
    # Commands and other programs
    "callback.order": ErrorCode("Methods of MLPerfCallback were called in an order that cannot give a valid log."),
    "command.launcher": ErrorCode("This command starts its own processes and must not run under a launcher."),
    "package.missing": ErrorCode("An optional Python package is not installed; the message gives the command."),
    "plan.impossible": ErrorCode(
        "No plan satisfies the request: the batch is too large, or memory or budget too small."
    ),
    "program.failed": ErrorCode("A program started by this command failed."),
    "program.missing": ErrorCode("A program that this command needs is not installed."),
    "run.diverged": ErrorCode("The loss is not finite."),
    # Files and folders
    "file.exists": ErrorCode("The target already exists and is never overwritten."),
    "file.in-input": ErrorCode("The output would be inside the input folder."),
    "file.in-the-way": ErrorCode("Files that this program did not write are in the output location."),
    "file.json": ErrorCode("A JSON document is damaged or has wrong fields."),
    "file.missing": ErrorCode("The file or folder does not exist."),
    "file.too-large": ErrorCode("A file is larger than this program accepts."),
    "file.unreadable": ErrorCode("The system does not allow this process to read the file."),
    "file.unwritable": ErrorCode("The file cannot be written: no permission, or no space."),
    "file.wrong-kind": ErrorCode("A file is given instead of a folder, or a pipe or device instead of a file."),
    "network.unreachable": ErrorCode("A download failed, or the network is not available."),
    # Data sets and text
    "data.changed": ErrorCode("Files changed while they were read."),
    "data.checksum": ErrorCode("The content differs from the checksum recorded with it."),
    "data.columns": ErrorCode("A data set has other columns than needed."),
    "data.damaged": ErrorCode("A file of the data set is damaged or truncated; restore it or prepare it again."),
    "data.duplicate": ErrorCode("The same data is given twice."),
    "data.empty": ErrorCode("The input contains no text, row, sample or masked token."),
    "data.encoding": ErrorCode("A file is compressed, or not UTF-8."),
    "data.format": ErrorCode("The data has an unsupported format or version."),
    "data.incomplete": ErrorCode("Files of the data set are missing, or its preparation did not finish."),
    "data.labels": ErrorCode("The labels of a task are missing, or do not match the number of classes."),
    "data.missing": ErrorCode("The folder contains no data set in a known format."),
    "data.mixed": ErrorCode("The folder mixes files of several data sets."),
    "data.model-mismatch": ErrorCode("The data does not fit the model's vocabulary or length."),
    "data.other-text": ErrorCode("The evaluation articles to withhold do not occur in this text."),
    "data.repetitive": ErrorCode("The text repeats itself too much to train on."),
    "data.row": ErrorCode("A row is malformed; the message gives its line."),
    "data.too-long": ErrorCode("A sequence is longer than the target allows."),
    "data.too-small": ErrorCode("There is too little data for the batch, the parts or the sets asked for."),
    "data.unsupported": ErrorCode("The data contains something that the target format cannot store."),
    "prepare.other-options": ErrorCode("The output folder was prepared from other input or with other options."),
    "vocabulary.format": ErrorCode("The vocabulary is damaged, too large, or not WordPiece."),
    "vocabulary.mismatch": ErrorCode("Data, model or tokenizer belong to different vocabularies."),
    "vocabulary.other-language": ErrorCode("The vocabulary does not cover most of the text."),
    # Models and checkpoints
    "checkpoint.checksum": ErrorCode("The tensors differ from the checksum recorded with them."),
    "checkpoint.damaged": ErrorCode("The checkpoint is damaged or truncated, or contains non-finite numbers."),
    "checkpoint.format": ErrorCode("The file is not a checkpoint in a known format."),
    "checkpoint.incomplete": ErrorCode("Tensors or files of the checkpoint are missing."),
    "checkpoint.missing": ErrorCode("The run or folder contains no checkpoint."),
    "checkpoint.shape": ErrorCode("The checkpoint belongs to a model of another shape."),
    "checkpoint.unsafe": ErrorCode("The checkpoint names Python objects, which are never loaded."),
    "model.shape": ErrorCode("The model's configuration is incomplete or contradicts itself."),
    "model.unsupported": ErrorCode("The other program or format does not support this model."),
    # Runs and ranks
    "device.broken": ErrorCode("A kernel broke the device; it cannot be used until the process restarts."),
    "device.memory": ErrorCode("The device has too little memory even for the smallest micro-batch."),
    "device.unavailable": ErrorCode("This machine lacks the device, or the device lacks the feature."),
    "distributed.identity": ErrorCode("The launcher's variables about ranks and nodes are missing or inconsistent."),
    "distributed.join": ErrorCode("Not all ranks joined in time, or they cannot connect to each other."),
    "distributed.layout": ErrorCode("The nodes have unequal numbers of ranks, or ranks out of order."),
    "machine.memory": ErrorCode("The machine has too little memory or too few mappings."),
    "machine.open-files": ErrorCode("The limit of open files is lower than this number of ranks needs."),
    "ops.unavailable": ErrorCode("The chosen implementation does not run here."),
    "run.damaged": ErrorCode("The run records in this folder are damaged."),
    "run.exists": ErrorCode("The folder already contains a finished run."),
    "run.in-use": ErrorCode("Another process is training in this folder."),
    "run.other-settings": ErrorCode("The run in this folder was made with other settings, data or seed."),
    "run.unfinished": ErrorCode("The folder contains an unfinished run; resume or remove it."),
    # Logs and submissions
    "log.incomplete": ErrorCode("The log lacks events that this command needs."),
    "log.missing": ErrorCode("No run log was found here."),
    "log.unsupported": ErrorCode("This command cannot repeat the run in the log."),
    "submission.commit": ErrorCode("The commit named by the log is not in this repository."),
    "submission.file-name": ErrorCode("The official tools reject this file name."),
}
