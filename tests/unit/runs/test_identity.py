"""What a log says of itself: a separate call for each event, nothing unknown,
the configuration complete.
"""

import hashlib
import re
import shlex
import shutil
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from mlaudit.logs import read_log
from mlbert.config.resolution import Resolved
from mlbert.data.loading.config import CorpusConfig
from mlbert.host.repository import PACKAGE_HOME
from mlbert.mlperf.config import SubmissionConfig
from mlbert.mlperf.mllog import MLPerfLogger
from mlbert.models.config import ModelConfig
from mlbert.recipes.sections import resolve, settings_by_key
from mlbert.runs import identity
from mlbert.runs.config import RunConfig
from mlbert.runs.identity import RunIdentity, RuntimeFacts, identify
from mlbert.runs.progress import Limits
from mlbert.runs.starting_weights import name_weights
from programs import write_files
from user_errors import user_error

DATA = {
    "train_data": "sha256:a",
    "eval_data": "sha256:b",
    "max_sequence_length": 512,
    "sequences_per_pack": 1.99,
}
PLACE = {"ranks": 4, "threads_per_rank": 8, "hosts": ["a", "a", "b", "b"], "gpus": {"A GPU": 2}}
VERSIONS = {"precision": "bf16", "ops": "plain", "cuda": "13.0", "cudnn": "91300", "nccl": "2.27.7"}
FACTS = RuntimeFacts(**DATA, **PLACE, **VERSIONS)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def resolved(recipe, environ, tmp_path: Path):
    config = {
        "config_x_1x1x8x2.sh": "source env.sh\nexport LR=2e-3\n",
        "env.sh": "export EVALDIR=/data/eval\n",
    }
    write_files(tmp_path, config | {"shape.json": "{}", "weights/model.safetensors": "x"})
    environ |= {
        "CONFIG_FILE": f"{tmp_path}/config_x_1x1x8x2.sh",
        "BERT_CONFIG": f"{tmp_path}/shape.json",
        "LR": "2e-3",
    }
    return resolve(recipe, environ | {"INIT_CHECKPOINT": f"{tmp_path}/weights"})


def identified(resolved: Resolved) -> RunIdentity:
    model = resolved.config[ModelConfig]
    return identify(
        resolved, FACTS, shape=model.bert_config_file, init_checkpoint=model.init_checkpoint
    )


def test_a_run_is_identified(resolved, tmp_path, monkeypatch):
    exports = {
        "CONT": "image:1",
        "MLBERT_IMAGE_COMMIT": "c0ffee",
        "MLBERT_IMAGE_DIGEST": "sha256:5eed",
        "NEXP": "5",
    }
    for name, value in exports.items():
        monkeypatch.setenv(name, value)
    made = identified(resolved)
    assert (made.image, made.image_commit, made.image_digest) == (
        "image:1",
        "c0ffee",
        "sha256:5eed",
    )
    config = tmp_path / "config_x_1x1x8x2.sh"
    site = tmp_path / "env.sh"
    assert (made.config_file, made.config_file_sha256) == (str(config), sha256(config.read_bytes()))
    assert made.config_parents == {str(site): sha256(site.read_bytes())}
    assert made.model_shape_sha256 == sha256(b"{}")
    assert re.fullmatch("[0-9a-f]{40}|tree:sha256:[0-9a-f]{64}", made.commit)
    assert {**DATA, **PLACE, **VERSIONS, "hosts": ["a", "b"]}.items() <= asdict(made).items()
    assert (made.nodes, made.starting_weights, made.starting_weights_sha256) == (
        2,
        "weights",
        sha256(b"x"),
    )
    assert (made.experiment, made.experiments) == (resolved.config[RunConfig].experiment, 5)
    assert shlex.split(made.command)[1:] == sys.orig_argv[1:]
    (tmp_path / "shape.json").unlink()
    with user_error("file.unreadable", tmp_path / "shape.json"):
        identified(resolved)


def test_every_event_is_a_call_that_names_its_key(resolved, tmp_path):
    logger = MLPerfLogger(tmp_path / "result_0.txt", 0, Path("/nonexistent"))
    config = resolved.config
    identity.log_submission(logger.event, config[SubmissionConfig])
    identity.log_identity(logger.event, identified(resolved), resolved)
    identity.log_batch_size(logger.event, 16, 2)
    identity.log_ends(
        logger.event,
        Limits.of(config[RunConfig], target_accuracy=0.72, max_steps=9),
        first_evaluation_samples=5,
        evaluation_interval_samples=6,
        evaluation_size=None,
    )
    source = Path(identity.__file__).read_text().splitlines()
    log = read_log(logger.path)
    assert {item.name for item in fields(RunIdentity)} | {"configuration"} <= {
        event.key for event in log.events
    }
    for event in log.events:
        assert event.metadata["file"] == f"{PACKAGE_HOME}/runs/identity.py"
        assert f'event("{event.key}", ' in source[event.metadata["lineno"] - 1]
        assert "unknown" not in event.text
    assert log.value("max_samples") == config[RunConfig].max_samples_termination
    assert set(log.value("configuration")) == {row.env for row in settings_by_key().values()}
    assert log.value("configuration")["LR"] == {
        "value": 2e-3,
        "origin": f"{tmp_path}/config_x_1x1x8x2.sh:2",
    }


def test_passwords_are_not_logged(resolved, monkeypatch):
    monkeypatch.setattr(
        sys, "orig_argv", ["mlbert", "train", "data_remote=s3://me:secret@host/x", "a b"]
    )
    corpus = CorpusConfig(masking_rate=0.1, data_remote="s3://me:secret@host/x")
    hidden = replace(resolved, config=resolved.config.replace(corpus))
    assert identified(hidden).command == "mlbert train data_remote=s3://***@host/x 'a b'"
    assert hidden.as_configuration()["DATA_REMOTE"]["value"] == "s3://***@host/x"
    assert "secret" not in hidden.as_json()


@pytest.mark.parametrize(
    "name", ["weights/model.safetensors", "model.safetensors", "pytorch_model.bin"]
)
def test_a_folder_means_its_weights(name, tmp_path):
    write_files(tmp_path / "run", {name: "w"})
    assert name_weights(tmp_path / "run") == ("run", sha256(b"w"))
    assert name_weights(tmp_path / "run" / name)[1] == sha256(b"w")


def test_a_checkpoint_of_tensorflow_is_its_files(tmp_path):
    parts = ["model.ckpt-7.data-00000-of-00001", "model.ckpt-7.index"]
    files = {name: name for name in (*parts, "model.ckpt-71.index", "model.ckpt-7.meta")}
    files["checkpoint"] = 'model_checkpoint_path: "/elsewhere/model.ckpt-7"\n'
    folder = write_files(tmp_path / "a", files)
    wanted = sha256("".join(f"{sha256(name.encode())}  {name}\n" for name in parts).encode())
    assert name_weights(folder / "model.ckpt-7") == ("model.ckpt-7", wanted)
    assert name_weights(folder / "model.ckpt-7.index")[1] == wanted
    assert name_weights(folder) == ("a", wanted)
    shutil.move(folder, tmp_path / "b")
    assert name_weights(tmp_path / "b/model.ckpt-7") == ("model.ckpt-7", wanted)


def test_missing_weights_are_reported(tmp_path):
    assert name_weights(None) == ("none", "none")
    assert name_weights(Path("gs:/bucket/model.ckpt")) == ("model.ckpt", "unknown")
    assert name_weights(tmp_path) == (tmp_path.name, "unknown")
