"""Configs are data: they set only known names, match their file name,
and reset the config sourced before.
"""

import functools
import json
import os
import re
import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest

from mlaudit.planner import cost as estimate
from mlaudit.planner.gpus import GPUS
from mlaudit.planner.timing import BENCHMARK
from mlbert.config.arguments import CommandLine
from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import Resolved
from mlbert.config.shell import planned_world_size
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.host.provenance import TENSORFLOW2
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.programs.run_plan import make_plan
from mlbert.recipes.registry import find
from mlbert.recipes.sections import check_exports, peek, read_yaml, resolve, settings_by_env
from mlbert.runs.config import RunConfig
from programs import run_checked
from tf2_bert import recipe as tensorflow2
from tree.conftest import CONFIG_FILES, YAML_CONFIGS

NAME = re.compile(
    r"config_(?P<system>\w+?)_(?P<nodes>\d+)x(?P<ranks>\d+)x(?P<batch>\d+)x(?P<steps>\d+)(_\w+)?\.sh"
)
SOURCE_LINE = 'source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"'
FP8_SYSTEMS = ("b200_n1", "dgxh100_n1", "dgxh100_n8", "gb200", "h200_n1", "inventec_p8000_h100_n1")
VALUES = Path(__file__).parents[1] / "assets/config/resolved_values.json"
STUBS = ("run.sub", "run_pretraining.py")
# Part of a description's accelerator name -> GPU; the first match counts.
GPU_NAMES = {
    "GB200": "gb200",
    "B200": "b200",
    "H200": "h200",
    "H100": "h100-sxm",
    "A100": "a100-sxm",
}


@functools.cache
def exports_after(*configs: Path, shell: str = "set -euo pipefail") -> dict[str, str]:
    names = " ".join(settings_by_env())
    lines = [shell, *(f"source '{config}'" for config in configs)]
    show = '[[ -v "${name}" ]] && printf "%s=%s\\0" "${name}" "${!name}"'
    lines.append(f"for name in {names}; do {show}; done; true")
    done = run_checked("bash", "-c", "\n".join(lines), env={"PATH": "/usr/bin:/bin"})
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def resolved_yaml(config: Path, tree_root: Path) -> Resolved:
    site = {
        "DATADIR_PHASE2": "/data/train",
        "EVALDIR": "/data/eval",
        "LOGDIR": "/runs",
        "MLPERF_SUBMISSION_ORG": "org",
    }
    site["BERT_CONFIG"] = str(
        tree_root / "benchmarks/bert/implementations/pytorch/configs/large.json"
    )
    line = CommandLine(yaml_files=[config])
    recipe = find(str(peek("recipe", {}, line)), lambda key: peek(key, site, line))
    return resolve(recipe, site, line)


def resolved_shell(values: Mapping[str, str]) -> Resolved:
    if values["RECIPE"] == TENSORFLOW2:
        return resolve(tensorflow2.RECIPE, values)
    return resolve(find(values["RECIPE"], lambda key: peek(key, values)), values)


def test_yaml_config_sets_each_key_once_and_only_overrides(yaml_config: Path) -> None:
    text = yaml_config.read_text()
    names = re.findall(r"^(\w+):", text, re.MULTILINE)
    assert len(names) == len(set(names))
    own = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
    parents = [
        yaml_config.parent / name for name in re.findall(r"^extends: (\S+)$", text, re.MULTILINE)
    ]
    inherited = {
        name: str(value) for parent in parents for name, (value, _) in read_yaml(parent, []).items()
    }
    assert {name for name, value in own.items() if inherited.get(name) == value} == set()


def test_yaml_config_resolves_and_its_plan_has_no_warnings(
    yaml_config: Path, tree_root: Path
) -> None:
    resolved = resolved_yaml(yaml_config, tree_root)
    assert not resolved.warnings
    (row,) = rows_of_table(yaml_config.parent, tree_root)
    nodes, ranks, batch, steps = map(
        int, re.search(r"\| (\d+) x (\d+) x (\d+) x (\d+) \|", row).groups()
    )
    config = resolved.config
    data = resolved.config[DataConfig]
    assert (batch, steps) == (data.train_batch_size, data.gradient_accumulation_steps)
    assert f"| `{config[RunConfig].recipe}` |" in row
    assert make_plan(config, nodes * ranks, {}).warnings == ()
    platform = config[SubmissionConfig].submission_platform
    assert platform == yaml_config.parent.name
    assert has_description(platform, tree_root)
    assert {path.name for path in yaml_config.parent.iterdir()} == {"README.md", "config.yaml"}


def rows_of_table(system: Path, tree_root: Path) -> list[str]:
    table = (tree_root / "benchmarks/bert/implementations/README.md").read_text()
    return [line for line in table.splitlines() if f"({system.name}/README.md)" in line]


def has_description(platform: str, tree_root: Path) -> bool:
    """Return True if there is a measured description or a template, but not both."""
    return len(list((tree_root / "systems").glob(f"**/{platform}.json"))) == 1


def test_config_has_only_comments_known_exports_and_one_source_line(config_file: Path) -> None:
    lines = [
        line for line in config_file.read_text().splitlines() if line and not line.startswith("#")
    ]
    assert [line for line in lines if line.startswith("source")] == [SOURCE_LINE]
    assert all(line == SOURCE_LINE or line.startswith("export ") for line in lines)
    names = re.findall(r"^export (\w+)=", config_file.read_text(), re.MULTILINE)
    assert len(names) == len(set(names))
    assert check_exports(config_file)


def test_config_matches_its_file_name_and_its_plan_has_no_warnings(
    config_file: Path, tree_root: Path
) -> None:
    match = NAME.fullmatch(config_file.name)
    assert match, (
        f"{config_file.name} is not "
        "config_<system>_<nodes>x<ranks>x<batch>x<accumulation>[_<variant>].sh"
    )
    values = exports_after(config_file)
    named = [int(match[part]) for part in ("nodes", "ranks", "batch", "steps")]
    exported = [
        int(values[name]) for name in ("DGXNNODES", "DGXNGPU", "BATCHSIZE", "GRADIENT_STEPS")
    ]
    assert named == exported
    assert values["DGXSYSTEM"] == config_file.name.removeprefix("config_").removesuffix(".sh")
    assert Path(values["CONFIG_FILE"]) == config_file
    assert has_description(values["MLPERF_SUBMISSION_PLATFORM"], tree_root)
    resolved = resolved_shell(values)
    ranks = planned_world_size(values)
    assert not resolved.warnings
    assert resolved.config[ModelConfig].bert_config_file.is_file()
    assert ranks == int(values["DGXNNODES"]) * int(values["DGXNGPU"])
    assert make_plan(resolved.config, ranks, values).warnings == ()


def test_sourcing_after_anything_in_any_folder_equals_sourcing_alone(
    config_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "config_other.sh"
    other.write_text("".join(f"export {name}=left_over\n" for name in settings_by_env()))
    assert exports_after(other, config_file, shell=f"cd '{tmp_path}'") == exports_after(config_file)


def test_every_config_resolves_to_the_recorded_values(tree_root: Path) -> None:
    """A changed default must not silently change a system.

    After an intended change, or for a new config, run this test with ``MLBERT_WRITE_VALUES=1`` and
    check the diff.
    """
    folder = tree_root / "benchmarks/bert/implementations"
    resolved = {path: resolved_yaml(path, tree_root) for path in YAML_CONFIGS}
    resolved |= {path: resolved_shell(exports_after(path)) for path in CONFIG_FILES}
    found = {}
    for path, values in resolved.items():
        texts = {
            env: json.dumps(entry["value"]) for env, entry in values.as_configuration().items()
        }
        own = {
            env: json.loads(text.replace(str(tree_root), "<tree>"))
            for env, text in texts.items()
            if text != "null"
        }
        found[path.relative_to(folder).as_posix()] = own
    if os.environ.get("MLBERT_WRITE_VALUES") == "1":
        lines = (
            f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}"
            for name in sorted(found)
        )
        VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    expected = json.loads(VALUES.read_text())
    assert expected.keys() <= found.keys()
    for config, values in expected.items():
        assert found[config] == values, config


def test_fp8_machines_have_an_fp8_variant_that_differs_only_in_the_precision(
    system_folder: Path,
) -> None:
    assert set(FP8_SYSTEMS) <= {path.parent.name for path in CONFIG_FILES}
    configs = set(system_folder.glob("config_*.sh"))
    in_bf16 = {path for path in configs if not path.stem.endswith("_fp8")}
    if system_folder.name in FP8_SYSTEMS:
        assert configs == in_bf16 | {path.with_stem(f"{path.stem}_fp8") for path in in_bf16}
    for config in configs - in_bf16:
        own = exports_after(config)
        other = exports_after(config.with_stem(config.stem.removesuffix("_fp8")))
        assert (own["PRECISION"], other["PRECISION"]) == ("fp8", "bf16")
        names = {"DGXSYSTEM", "CONFIG_FILE", "LOGDIR", "PRECISION", "FP8_FAST_ACCUMULATION"}
        assert {k for k in own | other if own.get(k) != other.get(k)} == names


def test_published_uses_of_the_gradient_buffer_are_tested(tree_root: Path) -> None:
    """A gradient that is neither cleared nor overwritten would train wrongly without a sign.

    tests/unit/training/test_step.py covers formats, graphs and accumulation, and clipping without
    graphs; tests/dist/test_poisoned_gradients.py covers reductions between ranks.
    """
    resolved = [resolved_yaml(path, tree_root) for path in YAML_CONFIGS]
    for path in CONFIG_FILES:
        values = exports_after(path)
        if values["RECIPE"] != TENSORFLOW2:
            resolved.append(resolved_shell(values))
    assert len(resolved) > 10
    for one in resolved:
        compute = one.config[ComputeConfig]
        distributed = one.config[DistributedConfig]
        assert compute.cuda_graph_mode in ("none", "segmented", "full_iteration")
        assert distributed.gradient_clipping in ("after", "before", "buckets")
        if distributed.gradient_clipping != "after":
            assert compute.cuda_graph_mode == "none", "not tested: clipping before in a graph"
            assert distributed.sharded_optimizer == "off", "not tested: clipping before, sharded"


def test_generated_files_are_up_to_date(tree_root: Path) -> None:
    made = runpy.run_path(str(tree_root / "tools/write_generated.py"))
    for name in ("RESET", "SETTINGS", "ERRORS", "RECORDS"):
        assert made[name].read_text() == made[f"{name.lower()}_text"](), (
            "run: python tools/write_generated.py"
        )


@pytest.mark.parametrize("stub", STUBS)
def test_stubs_are_equal_in_every_system(stub: str, tree_root: Path) -> None:
    by_framework: dict[bool, set[bytes]] = {True: set(), False: set()}
    for config in (tree_root / "benchmarks/bert/implementations").glob("*/config_*.sh"):
        runs_in_tensorflow = f"RECIPE={TENSORFLOW2}" in config.read_text()
        by_framework[runs_in_tensorflow and stub.endswith(".py")].add(
            (config.parent / stub).read_bytes()
        )
    assert all(len(stubs) <= 1 for stubs in by_framework.values())


def test_system_folder_is_small_and_its_environment_has_only_settings(system_folder: Path) -> None:
    names = re.findall(r"^\s*export (\w+)", (system_folder / "env.sh").read_text(), re.MULTILINE)
    assert set(names) <= set(settings_by_env())
    assert {"README.md", "env.sh", *STUBS} <= {path.name for path in system_folder.iterdir()}
    assert len((system_folder / "run_pretraining.py").read_text().splitlines()) <= 10
    common = sum(
        len((system_folder / name).read_text().splitlines())
        for name in ("README.md", "env.sh", *STUBS)
    )
    longest = max(len(path.read_text().splitlines()) for path in system_folder.glob("config_*.sh"))
    assert common + longest < 120


def test_every_system_and_config_is_listed(system_folder: Path, tree_root: Path) -> None:
    assert rows_of_table(system_folder, tree_root)
    table = (tree_root / "benchmarks/bert/implementations/README.md").read_text()
    for config in system_folder.glob("config_*.sh"):
        match = NAME.fullmatch(config.name)
        assert match
        shape = " x ".join(match[part] for part in ("nodes", "ranks", "batch", "steps"))
        rows = [line for line in table.splitlines() if f"`{config.name}`" in line]
        assert len(rows) == 1
        assert f"| {shape} |" in rows[0]


def test_step_fits_in_gpu_memory(config_file: Path, tree_root: Path) -> None:
    """Use the planner's estimate, which tests/tools/counted compares with a counted step."""
    values = exports_after(config_file)
    (description,) = (tree_root / "systems").glob(f"**/{values['MLPERF_SUBMISSION_PLATFORM']}.json")
    name = json.loads(description.read_text())["accelerator_model_name"]
    gpu = next((gpu for text, gpu in GPU_NAMES.items() if text in name), None)
    if gpu is None:
        pytest.skip("the system has no GPU that the planner knows")
    config = resolved_shell(values).config
    data = config[DataConfig]
    shape = BertConfig.from_json(config[ModelConfig].bert_config_file)
    packs = data.train_batch_size // data.gradient_accumulation_steps
    length = data.max_seq_length or shape.max_position_embeddings
    sequences = packs * length * BENCHMARK.sequences / BENCHMARK.tokens
    ranks = {"off": 1, "node": int(values["DGXNGPU"]), "all": planned_world_size(values) or 1}
    sharded = ranks[config[DistributedConfig].sharded_optimizer]
    in_fp8 = config[ComputeConfig].precision == "fp8"
    needed = estimate.of(shape, gpu, sequences, sharded, fp8=in_fp8)
    available = estimate.USABLE * GPUS[gpu].memory_gb
    assert needed.total <= available, f"{needed.total:.0f} GB of {available:.0f}: {needed}"
