"""Find the files of INIT_CHECKPOINT, fetch them from an address, and name them for the log."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.mds_files import locked
from mlbert.data.formats.tokenizer_files import TOKENIZER_FILES
from mlbert.host.errors import UserError
from mlbert.host.files import AddressError, fetch_file, local_path, read_pieces, read_plain
from mlbert.host.json_files import read_json, shown
from mlbert.host.native import cache_folder

CHECKPOINT_TENSORS = "tensors.safetensors"  # of a run's checkpoint, next to state.json
# Lists of the files of a large Hugging Face model.
SAFETENSORS_INDEX = "model.safetensors.index.json"
PYTORCH_INDEX = "pytorch_model.bin.index.json"
_IN_FOLDER = (
    "weights/model.safetensors",
    "model.safetensors",
    SAFETENSORS_INDEX,
    "pytorch_model.bin",
    PYTORCH_INDEX,
    CHECKPOINT_TENSORS,
)
_STEPS = (f"checkpoints/step_*/{CHECKPOINT_TENSORS}", f"step_*/{CHECKPOINT_TENSORS}")


_WHOLE = "Copy all files of the model again"
_COMPANIONS = ("bert_config.json", "config.json", *TOKENIZER_FILES)


@cache
def local_copy(source: Path | str) -> Path:
    """Return the path of weights, which may be at an address: they are then fetched to the user's
    cache folder, with the model's configuration and vocabulary next to them, by one process of a
    machine. Raises UserError if they cannot be fetched.
    """
    if (path := local_path(str(source))) is not None:
        return path
    parts = urlsplit(str(source))
    is_file = parts.path.endswith((".pt", ".bin", ".safetensors"))
    folder, _, name = (
        parts.path if is_file else f"{parts.path.rstrip('/')}/model.safetensors"
    ).rpartition("/")

    def address(file: str) -> str:
        return urlunsplit(parts._replace(path=f"{folder}/{file}"))

    pieces = read_pieces(address(name))
    found = next(pieces)
    # Without a version, size and start of the weights;
    # with one, not the query, whose signature differs each time.
    version = (
        found.version
        or f"{parts.query} {found.total} {hashlib.sha256(next(pieces, found).content).hexdigest()}"
    )
    key = hashlib.sha256("\0".join([parts.scheme, parts.netloc, folder, name, version]).encode())
    copy = cache_folder() / "weights" / key.hexdigest()[:32] / name
    with locked(copy):
        if not copy.exists():
            for companion in _COMPANIONS:
                _fetch_if_there(address(companion), copy.with_name(companion))
            fetch_file(address(name), copy)
    return copy


def _fetch_if_there(address: str, path: Path) -> None:
    try:
        fetch_file(address, path)
    except AddressError as error:
        if not error.is_lasting:  # it may be there, and the copy would stay incomplete
            raise


def weights_file(source: Path | str) -> Path:
    """Return the weights file in a folder: a run's ``weights/``, a Hugging Face model, a
    checkpoint, or a run's newest checkpoint. For a LOGDIR with one run, return that run's. Return a
    path that is not a folder unchanged. If a folder has no weights, return the path that is
    missing. Raises UserError as `local_copy`.
    """
    path = local_copy(source)
    if not path.is_dir():
        return path
    steps = (file for pattern in _STEPS for file in sorted(path.glob(pattern), reverse=True))
    found = next((file for name in _IN_FOLDER if (file := path / name).is_file()), None) or next(
        steps, None
    )
    runs = [folder for folder in path.glob("run_*") if folder.is_dir()]
    if found is None and len(runs) == 1:
        return weights_file(runs[0])
    exported = path / "model/model.safetensors"  # of mlbert pretrain, if its run was removed
    return found or (exported if exported.is_file() else path / "model.safetensors")


def newest_checkpoint(source: Path | str) -> Path:
    """Return the checkpoint that a path names, or the newest of the run or LOGDIR that it names.

    Raises UserError if there is none: only checkpoints have an optimizer's state.
    """
    path = Path(source)
    if (path / CHECKPOINT_TENSORS).is_file():
        return path
    patterns = (*_STEPS, *(f"run_*/{pattern}" for pattern in _STEPS))
    found = [file for pattern in patterns for file in path.glob(pattern)]
    if not found:
        remedy = "Name a run's folder or its checkpoint, or start without an optimizer's state"
        raise UserError("checkpoint.missing", path, "has no checkpoint of a run", remedy)
    return max(found, key=lambda file: file.parent.name).parent


def shards_of(index: Path) -> dict[Path, list[str]]:
    """Return the files that an index names, in the order of their names, and the tensors in each.

    Raises UserError if the index is damaged, or a file is missing or not next to it.
    """
    names = read_json(index, _WHOLE).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError("checkpoint.format", index, "has no weight_map", _WHOLE)
    shards: dict[Path, list[str]] = {}
    for tensor, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            reason = f"names {shown(file)}, which is not a file next to it"
            raise UserError("checkpoint.format", index, reason, _WHOLE)
        shards.setdefault(index.with_name(file), []).append(tensor)
    for shard in shards:
        if not shard.is_file():
            reason = f"is missing; {index.name} names it"
            raise UserError("checkpoint.incomplete", shard, reason, _WHOLE)
    return dict(sorted(shards.items()))


def name_weights(source: Path | str | None) -> tuple[str, str]:
    """Return the name (without folder) and SHA-256 of the weights that a run starts from.

    For several files, as in TensorFlow checkpoints, the digest is that of the ``sha256sum`` output
    for them, sorted by name. Both are "none" without a checkpoint; the digest is "unknown" if the
    file is not on this machine.
    """
    if source is None:
        return "none", "none"
    name = Path(urlsplit(str(source)).path).name if "://" in str(source) else Path(source).name
    try:
        digests = {file.name: file_sha256(file) for file in _files(local_copy(source))}
    except (OSError, UserError):
        digests = {}
    if len(digests) <= 1:
        return name, next(iter(digests.values()), "unknown")
    lines = "".join(f"{digest}  {file}\n" for file, digest in digests.items())
    return name, hashlib.sha256(lines.encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    """Return one file, all files of a sharded model, or all files of a TensorFlow checkpoint, which
    its prefix, one of its files or its folder names.
    """
    file = weights_file(path)
    if file.name in (SAFETENSORS_INDEX, PYTORCH_INDEX):
        return [file, *shards_of(file)]
    if path.is_dir() and not file.is_file() and (path / "checkpoint").is_file():
        text = read_plain(path / "checkpoint").decode(errors="replace")
        newest = re.search(r'^model_checkpoint_path: "(?:.*/)?([^/"]+)"', text, re.MULTILINE)
        file = path / (newest[1] if newest else "")
    prefix = re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", file.name)
    part_of = re.compile(rf"{re.escape(prefix)}\.(index|data-\d+-of-\d+)")
    return sorted(part for part in file.parent.glob("*") if part_of.fullmatch(part.name)) or [file]
