"""Seal a system's results: write ``SHA256SUMS`` of logs, run files and description,
optionally signed.

``cd results/<system> && sha256sum -c SHA256SUMS`` verifies it without this package.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.result_set import NAMES, run_file
from mlaudit.rules import BENCHMARK
from mlaudit.scratch_copy import RESULT_PATTERN
from mlaudit.tree_export import differs, digest_of
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain

SUMS = "SHA256SUMS"
_SSH_SIGNATURE = f"{SUMS}.sig"
_MINISIGN_SIGNATURE = f"{SUMS}.minisig"
FILES = (SUMS, _SSH_SIGNATURE, _MINISIGN_SIGNATURE)

_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^\\\r\n]+)")
_LOG_OF_A_RUN = re.compile(r"result_(\d+)\.txt")
_MAX_BYTES = 2**20
_RULE = "a seal covers every log, run file and the description"


def seal(system: str, tree: Path, logdir: Path | None = None, key: Path | None = None) -> list[str]:
    """Write the checksums of a system's files and optionally sign them.

    Args:
        system: name of the folder in ``results/`` and of the file in ``systems/``.
        tree: the submission tree.
        logdir: LOGDIR of the runs; their logs and run files are first copied to
            ``results/<system>``.
        key: private key of ssh or minisign (None does not sign).

    Returns:
        The files that the seal covers, relative to ``results/<system>``.

    Raises:
        UserError: a file is missing, would replace a different file,
            or cannot be written or signed.
    """
    folder = tree / "results" / system
    description = tree / "systems" / f"{system}.json"
    if Path(system).name != system or not description.is_file():
        reason = "does not exist"
        raise UserError(
            "file.missing", description, reason, "Name a system in systems/, or describe it first"
        )
    if key is not None and not key.is_file():
        reason = "is not a file"
        raise UserError(
            "file.missing", key, reason, "Name a private key, such as ssh-keygen -t ed25519 creates"
        )
    try:
        if logdir is not None:
            _copy_runs(logdir, folder)
        names = _names(folder)
        if not any(name.startswith(f"{BENCHMARK}/") for name in names):
            reason = f"contains no {RESULT_PATTERN}"
            raise UserError(
                "log.missing", folder / BENCHMARK, reason, "Name the LOGDIR of the runs with --from"
            )
        for name in names:
            if not name.isprintable() or "\\" in name:
                raise UserError(
                    "submission.file-name",
                    repr(name),
                    "has a name that sha256sum escapes",
                    "Rename it",
                )
        with tempfile.TemporaryDirectory(prefix="mlbert-seal-") as temporary:
            sums = Path(temporary) / SUMS
            sums.write_text(
                "".join(f"{digest_of(folder / name)}  {name}\n" for name in names), encoding="utf-8"
            )
            made = [sums] if key is None else [sums, _sign(sums, key)]
            for path in made:
                _put(path, folder / path.name)
            for name in {*FILES} - {path.name for path in made}:
                (folder / name).unlink(missing_ok=True)  # a signature of older sums
    except OSError as error:
        reason = f"cannot be read or written ({error.strerror or error})"
        raise UserError("file.unreadable", error.filename or folder, reason, "Fix it") from error
    return names


def _copy_runs(logdir: Path, folder: Path) -> None:
    """Copy logs and run files of a LOGDIR. Copies nothing if one of them exists and differs."""
    copies: dict[Path, Path] = {}
    for log in sorted(logdir.glob(RESULT_PATTERN)):
        if (match := _LOG_OF_A_RUN.fullmatch(log.name)) is None:
            continue  # log of an interrupted part
        copies[folder / BENCHMARK / log.name] = log
        for name in NAMES:
            if (source := run_file(log, name)) is not None:
                copies[folder / f"run_{match[1]}.{name}"] = source
    if not copies:
        raise UserError(
            "log.missing", logdir, "contains no result_<i>.txt", "Name the LOGDIR of finished runs"
        )
    for target, source in copies.items():
        if target.exists() and not filecmp.cmp(source, target, shallow=False):
            raise UserError(
                "file.exists",
                target,
                f"differs from {source}",
                "Remove it if you want the other file",
            )
    (folder / BENCHMARK).mkdir(parents=True, exist_ok=True)
    for target, source in copies.items():
        if not target.exists():
            _put(source, target)


def _put(source: Path, target: Path) -> None:
    """Copy a file atomically."""
    part = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, part)
    os.replace(part, target)


def _names(folder: Path) -> list[str]:
    """Return the files that a seal covers, relative to ``results/<system>``."""
    logs = (folder / BENCHMARK).glob(RESULT_PATTERN)
    runs = [path for name in NAMES for path in folder.glob(f"run_*.{name}")]
    inside = sorted(path.relative_to(folder).as_posix() for path in (*logs, *runs))
    return [*inside, _description(folder)]


def _description(folder: Path) -> str:
    return f"../../systems/{folder.name}.json"


def _sign(sums: Path, key: Path) -> Path:
    """Sign the checksums with the program for the key, and return the signature.

    Raises UserError on failure.
    """
    if b"minisign" in read_plain(key, "Name a private key")[:100]:
        signature = sums.with_name(_MINISIGN_SIGNATURE)
        program = "minisign"
        command = [program, "-S", "-s", str(key), "-m", str(sums), "-x", str(signature)]
    else:
        signature = sums.with_name(_SSH_SIGNATURE)
        program = "ssh-keygen"
        command = [program, "-Y", "sign", "-n", "file", "-f", str(key), str(sums)]
    if shutil.which(program) is None:
        raise UserError(
            "program.missing", program, "is not installed", f"Install it, or sign {SUMS} elsewhere"
        )
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not signature.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        reason = f"did not sign: {lines[-1]}"
        raise UserError(
            "program.failed", key, reason, "Use the private key of an ssh or minisign pair"
        )
    return signature


def check_seal(folder: Path) -> Complaints:
    """The sealed files are unchanged, all files are sealed, and the signature is valid."""
    sums = folder / SUMS
    signatures = [
        name for name in (_SSH_SIGNATURE, _MINISIGN_SIGNATURE) if (folder / name).is_file()
    ]
    if not sums.is_file():
        for name in signatures:
            yield _wrong(f"{name} signs {SUMS}, which is missing")
        if not signatures:
            yield Complaint(
                Outcome.NOTE, f"no {SUMS}; mlbert submission seal {folder.name} writes one"
            )
        return
    listed = {}
    try:
        for name, digest in _read(sums):
            if name in listed:
                raise ValueError(f"{SUMS} lists {name} twice")
            listed[name] = digest
    except ValueError as error:
        yield _wrong(str(error))
        return
    for name, digest in listed.items():
        if name != _description(folder) and (name.startswith("/") or ".." in name.split("/")):
            yield _wrong(f"{SUMS} lists {name}, which is outside the system's results")
        elif (problem := differs(folder / name, digest)) is not None:
            yield _wrong(f"{name} {problem}")
    for name in _names(folder):
        if name not in listed:
            yield _wrong(f"{name} is not in {SUMS}")
    for name in signatures:
        yield _verify(folder, name)


def _wrong(text: str) -> Complaint:
    return Complaint(Outcome.ERROR, text, _RULE)


def _read(sums: Path) -> Iterator[tuple[str, str]]:
    """Yield names and digests. Raises ValueError for anything that sha256sum does not write."""
    try:
        if sums.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{SUMS} is larger than {_MAX_BYTES // 2**20} MB")
        lines = sums.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"{SUMS} cannot be read") from None
    if lines == [""]:
        raise ValueError(f"{SUMS} is empty")
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{SUMS}:{number} is not a line of sha256sum")
        yield match[2], match[1]


def _verify(folder: Path, name: str) -> Complaint:
    """Check that a signature belongs to the checksums. Whose key made it cannot be verified."""
    if name == _MINISIGN_SIGNATURE:
        return Complaint(
            Outcome.NOTE, f"{name} is not verified: run minisign -V -p KEY.pub -x {name} -m {SUMS}"
        )
    command = ["ssh-keygen", "-Y", "check-novalidate", "-n", "file", "-s", name]
    try:
        with (folder / SUMS).open("rb") as sums:
            done = subprocess.run(
                command, cwd=folder, stdin=sums, capture_output=True, text=True, errors="replace"
            )
    except FileNotFoundError:
        return Complaint(Outcome.WARN, f"{name} is not verified: ssh-keygen is not installed")
    if done.returncode != 0:
        return _wrong(f"{name} is not a signature of {SUMS}")
    return Complaint(Outcome.NOTE, f"signed with {done.stdout.strip().rpartition(' with ')[2]}")
