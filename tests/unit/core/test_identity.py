"""What a log says of itself: every event a call of its own, nothing unknown, the configuration complete."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from mlbert.core import identity
from mlbert.core.config import resolve
from mlbert.core.errors import UserError
from mlbert.core.identity import Identity, identify, log_batch_size, log_identity, log_submission
from mlbert.core.mllog import MLPerfLogger
from mlbert.core.provenance import PACKAGE_HOME
from mlbert.core.settings import train_settings
from mlbert.submission.logs import read_log

GIVEN = {"train_data": "sha256:a", "eval_data": "sha256:b", "precision": "bf16", "ops": "plain", "ranks": 4}


@pytest.fixture
def resolved(defaults, environ, tmp_path: Path):
    (tmp_path / "env.sh").write_text("export EVALDIR=/data/eval\n")
    config = tmp_path / "config_x_1x1x8x2.sh"
    config.write_text("source env.sh\nexport LR=2e-3\n")
    shape = tmp_path / "shape.json"
    shape.write_text("{}")
    environ |= {"CONFIG_FILE": str(config), "BERT_CONFIG": str(shape), "LR": "2e-3"}
    return resolve(defaults, environ, {}, [], [])


def test_what_a_run_is_made_of(resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONT", "image:1")
    monkeypatch.setenv("MLBERT_IMAGE_COMMIT", "c0ffee")
    monkeypatch.setenv("MLBERT_IMAGE_DIGEST", "sha256:5eed")
    made = identify(resolved, **GIVEN)
    assert (made.image, made.image_commit, made.image_digest) == ("image:1", "c0ffee", "sha256:5eed")
    config, site = tmp_path / "config_x_1x1x8x2.sh", tmp_path / "env.sh"
    assert (made.config_file, made.config_file_sha256) == (str(config), hashlib.sha256(config.read_bytes()).hexdigest())
    assert made.config_parents == {str(site): hashlib.sha256(site.read_bytes()).hexdigest()}
    assert made.model_shape_sha256 == hashlib.sha256(b"{}").hexdigest()
    assert re.fullmatch("[0-9a-f]{40}|tree:sha256:[0-9a-f]{64}", made.commit)
    assert GIVEN.items() <= asdict(made).items()


def test_a_shape_that_is_gone(resolved, tmp_path: Path) -> None:
    (tmp_path / "shape.json").unlink()
    with pytest.raises(UserError, match=r"shape\.json: cannot be read"):
        identify(resolved, **GIVEN)


def test_every_event_is_a_call_that_names_its_key(resolved, tmp_path: Path) -> None:
    logger = MLPerfLogger(tmp_path / "result_0.txt", 0, Path("/nonexistent"))
    log_submission(logger.event, resolved.config)
    log_identity(logger.event, identify(resolved, **GIVEN), resolved)
    log_batch_size(logger.event, resolved.config, 16)
    source = Path(identity.__file__).read_text().splitlines()
    log = read_log(logger.path)
    assert {item.name for item in fields(Identity)} | {"configuration"} <= {event.key for event in log.events}
    for event in log.events:
        assert event.metadata["file"] == f"{PACKAGE_HOME}/core/identity.py"
        assert f'event("{event.key}", ' in source[event.metadata["lineno"] - 1]
        assert "unknown" not in event.text
    assert set(log.value("configuration")) == {row.env for row in train_settings().values()}
    assert log.value("configuration")["LR"] == {"value": 2e-3, "origin": f"{tmp_path}/config_x_1x1x8x2.sh:2"}
