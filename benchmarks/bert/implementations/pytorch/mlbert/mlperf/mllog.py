"""The MLPerf log of a run, on top of the official ``mlperf_logging.mllog``.

Rank 0 writes; the other ranks only validate their values. Every line carries the
repository-relative file and the line number of the call that logged it. Values must be plain
numbers, text or booleans: a tensor would hide a device synchronization, and the official package
would log a useless line for it instead of failing.

The rules and the checkers require this order::

    cache_clear  init_start  submission_*  seed  hyper-parameters  init_stop
    run_start  epoch_start  (eval_start  eval_stop  eval_accuracy)*  epoch_stop
    train_samples  eval_samples  run_stop {status}
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mlperf_logging.mllog import constants
from mlperf_logging.mllog.mllog import MLLogger

from mlbert.host.files import read_plain, writing
from mlbert.host.provenance import tree_relative

__all__ = ["MLPerfLogger", "close_interrupted", "constants"]

Value = int | float | str | bool | dict | list | None
Metadata = Mapping[str, Value] | None
CallSite = tuple[str, int]  # file and line

# The official tools match these keys anywhere in a line, and split a line at the last token.
_MISREAD_TEXTS = (
    "eval_accuracy",
    "eval_error",
    "global_batch_size",
    "submission_benchmark",
    "train_samples",
)
_TOKEN = ":::MLLOG "
_LOCK_TRIES = 20
_LOCK_PAUSE_SECONDS = 0.1


class _Writer(MLLogger):
    """The official logger, but errors raise and its lines cannot be misread by the official
    checkers.
    """

    def _do_log(self, level: int, message: str, clear_line: bool = False) -> None:
        if level >= logging.ERROR:
            cause = sys.exc_info()[1]  # the exception that the library caught
            raise cause if isinstance(cause, OSError) else TypeError(message.strip())
        if level == logging.INFO:
            super()._do_log(level, _TOKEN + _hide_texts(message.removeprefix(_TOKEN)), clear_line)


class _Handler(logging.FileHandler):
    """Raise write errors, such as a full disk, which `logging` would only print."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # the exception that `emit` caught


class MLPerfLogger:
    """Writer of one ``result_<i>.txt``.

    Args:
        path: the log file, whose folder is created (None writes nothing).
        rank: only rank 0 writes.
        root: folder of the submission tree; file names in the log are relative to it.
        append: append to an existing file instead of replacing it.

    Raises:
        UserError: the file cannot be written, now or at a later line.
    """

    def __init__(self, path: Path | None, rank: int, root: Path, *, append: bool = False) -> None:
        self.path = path
        self.rank = rank
        self.run_started = False
        self.status: str | None = None
        self._root = root.resolve()
        self._lock = threading.RLock()
        self._writer: _Writer | None = None
        self._handler: _Handler | None = None
        if path is not None and rank == 0:
            self._handler = _open_handler(path, append)
            logger = logging.Logger("mlperf", level=logging.INFO)
            logger.addHandler(self._handler)
            self._writer = _Writer(logger=logger)

    def start(self, key: str, value: Value = None, metadata: Metadata = None) -> None:
        """Log the start of an interval."""
        if key == constants.RUN_START:
            self.run_started = True
        self._log("start", key, value, metadata, _caller())

    def end(self, key: str, value: Value = None, metadata: Metadata = None) -> None:
        """Log the end of an interval."""
        self._log("end", key, value, metadata, _caller())

    def event(self, key: str, value: Value = None, metadata: Metadata = None) -> None:
        """Log a point in time.

        Raises:
            TypeError: the value is not plain.
            ValueError: a number is not finite.
        """
        self._log("event", key, value, metadata, _caller())

    def run_stop(self, status: str, metadata: Metadata = None) -> bool:
        """Log the end of the run once, with status "success" or "aborted".

        ``metadata`` is logged with it, such as the reason for an abort.
        Returns True if this call logged the end.
        """
        assert status in (constants.SUCCESS, constants.ABORTED), status
        return self._stop_run(status, metadata, _caller())

    def _stop_run(self, status: str, metadata: Metadata, call_site: CallSite) -> bool:
        with self._lock, self._alone():
            if not self.run_started or self.status is not None:
                return False
            self.status = status
            if self._was_closed_by_another():
                return False
            metadata = {**(metadata or {}), "status": status}
            self._log("end", constants.RUN_STOP, None, metadata, call_site)
            if self._handler is not None and self._handler.stream is not None:
                with self._writing():
                    os.fsync(self._handler.stream.fileno())
            return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a file lock while closing the log: two ranks may close a lost rank's log,
        or it may wake up meanwhile.

        Gives up after 2 s, so that a rank suspended while it holds the lock does not block the
        others.
        """
        stream = self._handler.stream if self._handler is not None else None
        if stream is None:
            yield
            return
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_LOCK_PAUSE_SECONDS)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):  # ValueError: closed meanwhile
                fcntl.flock(stream, fcntl.LOCK_UN)

    def _was_closed_by_another(self) -> bool:
        """Return True if another rank closed this log because it believed this rank lost (see
        `close_interrupted`).
        """
        if self._writer is None or self.path is None or not self.path.is_file():
            return False
        return f'"{constants.RUN_STOP}"' in self.path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Close the file. Later lines are silently dropped."""
        if self._handler is not None:
            with contextlib.suppress(OSError):  # already raised by the failed write
                self._handler.close()
        self._writer = None

    def _log(
        self, method: str, key: str, value: Value, metadata: Metadata, call_site: CallSite
    ) -> None:
        """Log a line by a method of the official logger: "start", "end" or "event"."""
        metadata = dict(metadata or {})
        _check_plain(key, value)
        _check_plain(key, metadata)
        if key == constants.EVAL_ACCURACY and "epoch_num" not in metadata:
            raise ValueError("eval_accuracy: metadata needs epoch_num, the training samples so far")
        if self._writer is None:
            return
        site = {"file": tree_relative(Path(call_site[0]), self._root), "lineno": call_site[1]}
        with self._lock, self._writing():
            getattr(self._writer, method)(key=key, value=value, metadata={**site, **metadata})

    def _writing(self) -> AbstractContextManager[None]:
        return writing(str(self.path), "Free space on its disk")


def close_interrupted(path: Path, root: Path, reason: str) -> bool:
    """Close the log of a dead process with run_stop, status aborted.

    A log without run_start or with run_stop is left as it is.
    Returns True if this call closed the log.

    Raises:
        UserError: the file cannot be read or written.
    """
    text = read_plain(path, "Name the log of a run").decode(errors="replace")
    if f'"{constants.RUN_START}"' not in text or f'"{constants.RUN_STOP}"' in text:
        return False
    if not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as end:
            end.write("\n")  # the interrupted process left a partial line
    logger = MLPerfLogger(path, rank=0, root=root, append=True)
    logger.run_started = True
    added = logger._stop_run(constants.ABORTED, {"reason": reason}, _caller())
    logger.close()
    return added


def _hide_texts(line: str) -> str:
    """Return the same JSON with the strings that the official tools misread escaped
    (``\\u0065val_accuracy``).
    """
    for text in (*_MISREAD_TEXTS, _TOKEN):
        if f'"key": "{text}"' not in line:
            line = line.replace(text, f"\\u{ord(text[0]):04x}{text[1:]}")
    return line


def _open_handler(path: Path, append: bool) -> _Handler:
    with writing(path, "Choose a LOGDIR that is writable"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return _Handler(path, mode="a" if append else "w", encoding="utf-8")


def _caller() -> CallSite:
    """Return the file and line of the code that called the caller."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def _check_plain(key: str, value: Any) -> None:
    if value is None or type(value) in (int, str, bool):
        return
    if type(value) is float:
        if not math.isfinite(value):
            raise ValueError(f"{key}: {value} cannot be logged, it is not finite")
    elif type(value) is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise TypeError(f"{key}: {name!r} is not text")
            _check_plain(key, item)
    elif type(value) is list:
        for item in value:
            _check_plain(key, item)
    else:
        raise TypeError(f"{key}: {type(value).__name__} is not a plain int, float, str or bool")
