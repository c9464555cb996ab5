"""Error codes, each with a sentence: what happened, and what usually helps.
docs/errors.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping

ERROR_CODES: Mapping[str, str] = {
    # Settings: exports, flags, YAML keys, key=value words
    "config.ambiguous": "Several choices are possible, and none was named.",
    "config.choice": "The value is not one of the choices; the message lists them.",
    "config.conflict": "Two settings contradict each other, or do not apply together.",
    "config.duplicate": "The same name is given twice.",
    "config.file": "A configuration file cannot be parsed, or contains what it must not contain.",
    "config.missing": "A required setting or argument is missing.",
    "config.not-read": (
        "The chosen recipe does not read this setting; the message names the recipes that do."
    ),
    "config.range": "A number is outside its allowed range.",
    "config.syntax": "A command-line argument is neither a flag nor name=value.",
    "config.unknown-name": (
        "No setting, key or flag has this name; the message names the nearest one."
    ),
    "config.unsupported": (
        "The published program has this option, but this one does not support it."
    ),
    "config.value": "The value has the wrong type or form.",
    # Commands and other programs
    "callback.order": (
        "Methods of MLPerfCallback were called in an order that cannot give a valid log."
    ),
    "command.launcher": "This command starts its own processes and must not run under a launcher.",
    "package.broken": (
        "A package on PYTHONPATH fails. It takes the place of the installed one, so unset "
        "PYTHONPATH."
    ),
    "package.missing": (
        "An optional Python package is not installed; the message gives the command."
    ),
    "plan.impossible": (
        "No plan satisfies the request: the batch is too large, or memory or budget too small."
    ),
    "program.failed": "A program started by this command failed.",
    "program.missing": "A program that this command needs is not installed.",
    "run.diverged": "The loss is not finite. Try a lower learning rate or another seed.",
    # Files and folders
    "file.exists": "The target already exists and is never overwritten.",
    "file.in-input": "The output would be inside the input folder.",
    "file.in-the-way": "Files that this program did not write are in the output location.",
    "file.json": "A JSON document is damaged or has wrong fields.",
    "file.missing": "The file or folder does not exist.",
    "file.too-large": "A file is larger than this program accepts.",
    "file.unreadable": "The system does not allow this process to read the file.",
    "file.unwritable": "The file cannot be written: no permission, or no space.",
    "file.wrong-kind": (
        "A file is given instead of a folder, or a pipe or device instead of a file."
    ),
    "network.unreachable": "A download failed, or the network is not available.",
    # Data sets and text
    "data.changed": "Files changed while they were read. Restore them, or open them again.",
    "data.checksum": "The content differs from the checksum recorded with it.",
    "data.columns": "A data set does not have the columns that are needed.",
    "data.damaged": (
        "A file of the data set is damaged or truncated; restore it or prepare it again."
    ),
    "data.duplicate": "The same data is given twice.",
    "data.empty": "The input contains no text, row, sample or masked token.",
    "data.encoding": "A file is compressed, or not UTF-8.",
    "data.format": "The data has an unsupported format or version.",
    "data.incomplete": "Files of the data set are missing, or its preparation did not finish.",
    "data.labels": "The labels of a task are missing, or do not match the number of classes.",
    "data.missing": "The folder contains no data set in a known format.",
    "data.mixed": "The folder mixes files of several data sets.",
    "data.model-mismatch": "The data does not fit the model's vocabulary or length.",
    "data.other-text": "The evaluation articles to withhold do not occur in this text.",
    "data.repetitive": "The text repeats itself too much to train on.",
    "data.row": "A row is malformed; the message gives its line.",
    "data.too-long": "A sequence is longer than the target allows.",
    "data.too-small": "There is too little data for the batch, the parts or the sets requested.",
    "data.unsupported": (
        "The data contains something that the target format cannot store. Choose another format."
    ),
    "prepare.other-options": (
        "The output folder was prepared from different input or with different options."
    ),
    "prepare.other-version": (
        "The output folder was begun by a different version of this package. Complete it with that "
        "version, or remove it and begin again."
    ),
    "vocabulary.format": "The vocabulary is damaged, too large, or in an unsupported form.",
    "vocabulary.mismatch": "Data, model and tokenizer do not have the same vocabulary.",
    "vocabulary.other-language": "The vocabulary does not cover most of the text.",
    "vocabulary.unsupported": (
        "The tokenizer has an unsupported property that changes token ids, or lacks a special "
        "token; the message names it."
    ),
    # Models and checkpoints
    "checkpoint.checksum": "The tensors differ from the checksum recorded with them.",
    "checkpoint.damaged": "The checkpoint is damaged or truncated, or contains non-finite numbers.",
    "checkpoint.format": "The file is not a checkpoint in a known format.",
    "checkpoint.incomplete": "Tensors or files of the checkpoint are missing.",
    "checkpoint.missing": "The run or folder contains no checkpoint.",
    "checkpoint.shape": "The checkpoint belongs to a model of a different shape.",
    "checkpoint.unsafe": "The checkpoint names Python objects, which are never loaded.",
    "model.shape": "The model's configuration is incomplete or contradicts itself.",
    "model.unsupported": "The other program or format does not support this model.",
    # Runs and ranks
    "device.broken": "A kernel broke the device; it cannot be used until the process restarts.",
    "device.memory": (
        "The device has too little memory even for the smallest micro-batch. Take a smaller "
        "model, or a batch that is a power of two."
    ),
    "device.unavailable": (
        "This machine lacks the device, or the device lacks the feature. Choose another device "
        "or precision."
    ),
    "distributed.failed": (
        "A rank failed before the run began, though not because of wrong input. Its own output, "
        "above, gives the reason."
    ),
    "distributed.identity": (
        "The launcher's variables about ranks and nodes are missing or inconsistent."
    ),
    "distributed.join": "Not all ranks joined in time, or they cannot connect to each other.",
    "distributed.layout": (
        "The nodes have unequal numbers of ranks, or ranks out of order. Start the same number "
        "on each node."
    ),
    "distributed.settings": (
        "The ranks have different settings, data or model shapes. Give all of them the same "
        "exports, configuration files and data."
    ),
    "machine.memory": "The machine has too little memory or too few mappings.",
    "machine.open-files": (
        "The limit of open files is lower than this number of ranks needs. Raise it on every "
        "node (LimitNOFILE of slurmd, --ulimit nofile of Docker)."
    ),
    "ops.unavailable": "The chosen implementation does not run here.",
    "run.damaged": "The run records in this folder are damaged. Start again in another folder.",
    "run.exists": "The folder already contains a finished run.",
    "run.in-use": (
        "Another process is training in this folder. Wait for it, or choose another folder."
    ),
    "run.other-settings": "The run in this folder was made with different settings, data or seed.",
    "run.unfinished": (
        "The folder contains an unfinished run. Set RESUME=1 to continue it, or remove it."
    ),
    # Logs and submissions
    "log.incomplete": "The log lacks events that this command needs.",
    "log.missing": "No run log was found here.",
    "log.other-benchmark": "The log comes from a benchmark other than BERT.",
    "log.unsupported": "This command cannot repeat the run in the log.",
    "submission.commit": "The commit named by the log is not in this repository.",
    "submission.file-name": "The official tools reject this file name.",
}
