"""Export a model to ONNX: ``mlbert export RUN --to onnx``.

The folder has what onnxruntime, Optimum and transformers.js look for: ``model.onnx`` (float32),
``config.json`` and the tokenizer's files. Inputs are int64 [S, L] as in Hugging Face's model
(`input_ids`, `attention_mask`, and `token_type_ids` of models with segments), for any number of
sequences S and length L; the output is `logits`, or `last_hidden_state` of a folder of
sentence-transformers. The graph is that of Hugging Face's class, because our own model reads
unpadded streams. Each written file is run, and compared with PyTorch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlbert.host.errors import UserError, import_package
from mlbert.host.json_files import read_json
from mlbert.models.weights import roberta
from mlbert.models.weights.embedding_folder import MODULES, export_embeddings
from mlbert.models.weights.load import WEIGHTS, export_to_huggingface
from mlbert.models.weights.weight_files import check_target, new_path

MODEL = "model.onnx"
INT8_MODEL = "model_int8.onnx"
_PACKAGES = ("onnx", "onnxscript", "onnxruntime", "transformers")
_REMEDY = "Use --to huggingface, and report the versions of torch and onnxruntime"
TOLERANCE = 1e-4  # largest difference of logits between PyTorch and the float32 file
_HEADS = ("ForSequenceClassification", "ForTokenClassification")  # others are masked-LM models
_LOGITS = "logits"
_HIDDEN_STATES = "last_hidden_state"  # of an encoder without a head
_HEAD_NAMES = ("cls.predictions.", "classifier.")  # begin the names of heads' parameters
# Batches on which the programs are compared, (sequences, tokens of the longest): none has the sizes
# with which the graph was traced.
_TRACED = (2, 24)
_COMPARED = ((1, 7), (3, 32), (2, 48))
_TIMED = (8, 128)
_REPEATS = 5
# Bytes of weights; protobuf allows 2 GiB, so more go to a second file.
_LARGEST_FILE = 1_900_000_000


@dataclass(frozen=True)
class Comparison:
    """One file against PyTorch.

    Attributes:
        name: of the file, or of PyTorch.
        num_bytes: size of the weights on disk.
        difference: largest absolute difference of the outputs of real tokens.
        agreement: a sentence about what the difference changes; None if the output is one number.
        seconds: median time of a batch of `_TIMED`.
    """

    name: str
    num_bytes: int
    difference: float
    agreement: str | None
    seconds: float


def export_onnx(source: Path, target: Path, int8: bool = False) -> list[Comparison]:
    """Write a folder with a model in ONNX, and with its 8-bit form.

    Args:
        source: as for `mlbert.models.weights.load.export_to_huggingface`, or a folder of
            sentence-transformers.
        target: the new folder.
        int8: also write `INT8_MODEL`, with weights in 8 bits and activations quantized when read.

    Returns:
        PyTorch, then each file, compared on random tokens.

    Raises:
        UserError: a package is missing, there are no weights or only those of an encoder, the
            target exists, the exporter refuses the model, or the written file differs from PyTorch
            by more than `TOLERANCE`.
    """
    for package in _PACKAGES:
        import_package(package, "--to onnx", "onnx")
    check_target(target)
    with new_path(target) as folder:
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
        _write_source(source, folder)
        model = _Network(folder)
        _write_graph(model, folder / MODEL)
        files = [folder / MODEL]
        if int8:
            _quantize(folder / MODEL, folder / INT8_MODEL)
            files.append(folder / INT8_MODEL)
        found = _compare(model, folder / WEIGHTS, files)
        if (difference := found[1].difference) > TOLERANCE:
            reason = f"differs from PyTorch by {difference:.1g} in its {model.output}"
            raise UserError("model.unsupported", MODEL, reason, _REMEDY)
        (folder / WEIGHTS).unlink()  # its numbers are in the graph
    return found


def _write_source(source: Path, folder: Path) -> None:
    """Write the model in PyTorch's form. Raise UserError if its head would be a new one."""
    if (source / MODULES).is_file():
        export_embeddings(source, folder)
        return
    missing = export_to_huggingface(source, folder)
    if any(name.startswith(_HEAD_NAMES) for name in missing):
        remedy = "Export it --to sentence-transformers, and that folder --to onnx"
        reason = "has no head: its logits would be random"
        raise UserError("checkpoint.shape", source, reason, remedy)


class _Network(nn.Module):
    """Hugging Face's model of a folder, with tensors as arguments and as result.

    Attributes:
        output: name of the result.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        import transformers

        config = read_json(folder / "config.json", "Export the run again")
        (architecture,) = config["architectures"]
        head = next((name for name in _HEADS if architecture.endswith(name)), "ForMaskedLM")
        self.output = _LOGITS
        if architecture.endswith("Model"):
            head = ""
            self.output = _HIDDEN_STATES
        kind = getattr(transformers, f"AutoModel{head}")
        with _quiet():
            # The code of shapes that transformers lacks is ours, copied into the folder.
            self.model = kind.from_pretrained(folder, trust_remote_code=True).eval()
        self.vocab_size = int(config["vocab_size"])
        self.pad_token_id = int(config.get("pad_token_id") or 0)
        positions = int(config["max_position_embeddings"])
        unused = self.pad_token_id + 1 if config["model_type"] == roberta.MODEL_TYPE else 0
        self.max_length = positions - unused
        has_segments = int(config.get("type_vocab_size") or 0) > 1
        segments = ["token_type_ids"] if has_segments else []
        self.names = ["input_ids", "attention_mask", *segments]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the logits, [S, L, V], [S, L, labels] or [S, labels], or the hidden states,
        [S, L, D].
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            given["token_type_ids"] = token_type_ids
        return self.model(**given)[self.output]

    def inputs(self, sequences: int, length: int, seed: int) -> dict[str, Tensor]:
        """Return random tokens, int64 [S, L]; the last sequence is padded from its middle on, if
        there are several. L is ``length``, or the model's positions if they are fewer.
        """
        length = min(length, self.max_length)
        draw = torch.Generator().manual_seed(seed)
        size = (sequences, length)
        ids = torch.randint(self.vocab_size - 1, size, generator=draw)
        ids += ids >= self.pad_token_id  # any entry but that one
        mask = torch.ones_like(ids)
        if sequences > 1:
            mask[-1, length // 2 :] = 0
        ids[mask == 0] = self.pad_token_id
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        return {name: values[name] for name in self.names}


def _write_graph(model: _Network, file: Path) -> None:
    example = model.inputs(*_TRACED, seed=0)
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    num_bytes = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    try:
        with _quiet():
            torch.onnx.export(
                model,
                tuple(example.values()),
                file,
                input_names=model.names,
                output_names=[model.output],
                dynamic_shapes=tuple(any_size for _ in model.names),
                dynamo=True,
                external_data=num_bytes > _LARGEST_FILE,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        first_line, _, _ = str(error).strip().partition("\n")
        reason = f"cannot be exported by torch.onnx ({first_line})"
        raise UserError("model.unsupported", MODEL, reason, _REMEDY) from None


def _quantize(file: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(file, target, weight_type=QuantType.QInt8)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's and the loader's reports of progress from the screen; errors are
    raised.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        unread = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(unread),
            contextlib.redirect_stderr(unread),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def _compare(model: _Network, weights: Path, files: list[Path]) -> list[Comparison]:
    programs: dict[str, Callable[[Mapping[str, Tensor]], np.ndarray]] = {
        "PyTorch": lambda given: model(**given).numpy()
    }
    programs |= {file.name: _session(file) for file in files}
    sizes = [weights.stat().st_size, *(_size_of(file) for file in files)]
    batches = [model.inputs(*size, seed=seed) for seed, size in enumerate(_COMPARED)]
    expected = [programs["PyTorch"](batch) for batch in batches]
    times = _times(programs, model.inputs(*_TIMED, seed=0))
    found = []
    for (name, run), num_bytes in zip(programs.items(), sizes, strict=True):
        largest = 0.0
        agreeing = []
        for batch, wanted in zip(batches, expected, strict=True):
            given = _real(run(batch), batch)
            wanted = _real(wanted, batch)
            largest = max(largest, float(np.abs(given - wanted).max()))
            if model.output == _LOGITS:
                agreeing.append(given.argmax(-1) == wanted.argmax(-1))
            else:
                agreeing.append(_cosines(given, wanted))
        every = np.concatenate(agreeing)
        agreement = None
        if model.output == _LOGITS and wanted.shape[-1] > 1:
            agreement = f"{every.mean():.1%} of the first guesses are the same"
        elif model.output != _LOGITS:
            least = every.min()
            agreement = f"tokens' vectors have a cosine with PyTorch's of at least {least:.4f}"
        found.append(Comparison(name, num_bytes, largest, agreement, times[name]))
    return found


def _cosines(given: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the cosines of two matrices' rows."""
    lengths = np.linalg.norm(given, axis=-1) * np.linalg.norm(wanted, axis=-1)
    return (given * wanted).sum(-1) / lengths


def _session(file: Path) -> Callable[[Mapping[str, Tensor]], np.ndarray]:
    """Return a function that runs a file on as many threads as PyTorch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(given: Mapping[str, Tensor]) -> np.ndarray:
        (logits,) = session.run(None, {name: value.numpy() for name, value in given.items()})
        return logits

    return run


def _size_of(file: Path) -> int:
    """Return the bytes of a model's file and of the one that has its larger tensors, if any."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))


def _real(logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray:
    """Return the outputs, [S, labels] or [S, L, V], without those of padding."""
    is_of_tokens = logits.ndim == len(("sequence", "token", "entry"))
    return logits[batch["attention_mask"].numpy() > 0] if is_of_tokens else logits


def _times(
    programs: Mapping[str, Callable[[Mapping[str, Tensor]], Any]], batch: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the median seconds of each program for a batch; they take turns."""
    measured: dict[str, list[float]] = {name: [] for name in programs}
    for run in programs.values():
        run(batch)  # the first call allocates
    for _ in range(_REPEATS):
        for name, run in programs.items():
            began = time.perf_counter()
            run(batch)
            measured[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in measured.items()}
