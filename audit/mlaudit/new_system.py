"""Create the folder and description template of a new system from an existing one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from mlaudit.settings import check_exports
from mlaudit.spread_batch import spread_batch
from mlbert.config.sources import parse_config_name
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically, writing
from mlbert.host.json_files import read_json
from mlbert.host.system_description import FOLDER, MARK, NO_ACCELERATORS, NOT_THERE, template

IMPLEMENTATIONS = Path("benchmarks/bert/implementations")
STUBS = ("run.sub", "run_pretraining.py")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*")
_LONGEST_NAME = 64
_PLATFORM = re.compile(r"^(export MLPERF_SUBMISSION_PLATFORM)=.*$", re.MULTILINE)

_README = """\
# {name}: {mark}: vendor, model and accelerators

Made from [`{other}`](../{other}/README.md), not measured yet. The machine's description is a
template, [`{name}.json`](../../../../systems/templates/{name}.json).

```bash
source {config} && sbatch -N ${{DGXNNODES}} -t ${{WALLTIME}} run.sub
```

After sourcing, `mlbert train --print-config` shows every value, where it comes from, and warnings.

## Sources of the numbers

| settings | source |
|---|---|
| all numbers of `{config}` | those of [`{other_config}`](../{other}/{other_config}), {kept} |
"""


@dataclass(frozen=True)
class NewSystem:
    """The files of a new system."""

    folder: Path
    config: str  # name of the config in it
    template: Path  # of the machine's description
    row: str  # line for the table of ``benchmarks/bert/implementations/README.md``
    changes: tuple[str, ...]  # what another number of GPUs changes


def new_system(
    name: str,
    other: str,
    tree: Path,
    config: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
) -> NewSystem:
    """Create ``implementations/<name>/`` and ``systems/templates/<name>.json`` from the system
    ``other``.

    Files are written under temporary names and renamed, the folder last.

    Args:
        name: letters, digits and underscores; also the name of the results folder
            and of the description.
        other: an existing system.
        tree: root of the tree.
        config: config of the other system to copy;
            required if it has several, not counting those for FP8.
        nodes, gpus: of the new system, GPUs of each node; the batch of all GPUs stays
            (`mlaudit.spread_batch`). None: as in the other system.

    Raises:
        UserError: the name is invalid or taken, the system or config is unknown or ambiguous,
            the batch does not fit the GPUs, or a write failed.
    """
    home = tree / IMPLEMENTATIONS
    _check_name(name, tree)
    source = home / other
    known = sorted(path.parent.name for path in home.glob("*/env.sh"))
    if other not in known:
        reason = "is not a system of this repository"
        raise UserError("config.choice", f"--from {other}", reason, "Choose another", known)
    chosen = _choose_config(source, config)
    parts = parse_config_name(chosen.name)
    assert parts is not None
    exports = {name: export.text for name, export in check_exports(chosen).items()}
    config_text = _renamed(chosen, other, name)
    site_text = _renamed(source / "env.sh", other, name)
    changes: tuple[str, ...] = ()
    if nodes is not None or gpus is not None:
        spread = spread_batch(parts, exports, nodes, gpus)
        parts = spread.parts
        exports |= spread.exports
        config_text = spread.config(config_text)
        site_text = spread.site(site_text)
        changes = spread.lines
    config_name = f"config_{name}_{parts.shape}.sh"
    kept = "spread over other GPUs, the rest unchanged" if changes else "unchanged"
    files = {
        config_name: config_text,
        "env.sh": site_text,
        "README.md": _README.format(
            name=name,
            other=other,
            config=config_name,
            other_config=chosen.name,
            mark=MARK,
            kept=kept,
        ),
        **{stub: (source / stub).read_text(encoding="utf-8") for stub in STUBS},
    }
    description = tree / "systems" / FOLDER / f"{name}.json"
    text = json.dumps(template(_known(exports, tree, other)), indent=2, ensure_ascii=False) + "\n"
    if description.exists() and description.read_text(encoding="utf-8") != text:
        raise UserError("file.exists", description, "exists", "Choose another name, or remove it")
    _write(home / name, files, description, text)
    shape = f"{parts.nodes} x {parts.ranks} x {parts.batch} x {parts.accumulation}"
    model = Path(exports.get("BERT_CONFIG", "unknown.json")).stem
    row = (
        f"| [`{name}`]({name}/README.md) | `{config_name}` | {shape} | `{exports.get('RECIPE')}` "
        f"| `{model}` | no |"
    )
    return NewSystem(home / name, config_name, description, row, changes)


def _check_name(name: str, tree: Path) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        reason = (
            f"is not a valid name: a name has at most {_LONGEST_NAME} letters, digits and single "
            "underscores, and starts with a letter"
        )
        raise UserError("config.value", repr(name), reason, "Choose a name such as acme_x1_h100_n1")
    if re.search(r"_\d+x\d+", name):
        reason = "looks like the numbers of a config"
        raise UserError(
            "config.value", name, reason, "They follow the name in the config's file name"
        )
    taken = {path.name.lower(): path for path in (tree / IMPLEMENTATIONS).iterdir()}
    taken |= {path.stem.lower(): path for path in (tree / "systems").glob("*.json")}
    if name.lower() in taken:
        raise UserError(
            "file.exists", taken[name.lower()], "exists", "Choose another name, or remove it"
        )


def _choose_config(source: Path, config: str | None) -> Path:
    configs = sorted(path for path in source.glob("config_*.sh") if parse_config_name(path.name))
    names = [path.name for path in configs]
    # The FP8 configs differ only in precision.
    in_bf16 = [path for path in configs if not path.stem.endswith("_fp8")]
    if config is None and len(in_bf16) == 1:
        return in_bf16[0]
    if config is None:
        reason = f"has {len(configs)} configs" if configs else "has no config"
        remedy = "Choose with --config" if configs else "Choose another system"
        raise UserError("config.ambiguous", source, reason, remedy, names)
    for path in configs:
        if path.name == config:
            return path
    reason = f"is not a config of {source.name}"
    raise UserError("config.choice", f"--config {config}", reason, "Choose another", names)


def _renamed(path: Path, other: str, name: str) -> str:
    """Return the file's text with the new system's name, also in its first line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if path.name == "env.sh":
        lines[0] = (
            f"# Site settings of {name}: image, paths and launcher arguments. "
            "Edit this file for your site.\n"
        )
    elif lines and lines[0].startswith("#"):
        lines[0] = f"# {name}, with the numbers of {other}/{path.name}.\n"
    # Not in a path to data, such as /data/modernbert, or to a config that is sourced.
    text = re.sub(rf"(?<!/)\b{re.escape(other)}\b(?!/config_)", name, "".join(lines))
    return _PLATFORM.sub(rf"\1={name}", text)


def _known(exports: dict[str, str], tree: Path, other: str) -> dict[str, str]:
    """Return the fields known from the config: nodes, division,
    and accelerators or their absence.
    """
    known = {
        "number_of_nodes": exports["DGXNNODES"],
        "division": exports.get("MLPERF_DIVISION", ""),
    }
    if exports["DGXNNODES"] == "1":
        known["host_networking_topology"] = NOT_THERE
    has_none = _without_accelerators(tree, other)
    return known | (NO_ACCELERATORS if has_none else {"accelerators_per_node": exports["DGXNGPU"]})


def _without_accelerators(tree: Path, other: str) -> bool:
    paths = (folder / f"{other}.json" for folder in (tree / "systems", tree / "systems" / FOLDER))
    found = next((path for path in paths if path.is_file()), None)
    return found is not None and read_json(found, "Fix it").get("accelerators_per_node") == "0"


def _write(folder: Path, files: dict[str, str], description: Path, text: str) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    with writing(folder, "Choose a tree that is writable"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name, content in files.items():
            (partial / name).write_text(content, encoding="utf-8")
        description.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(description, text)
        partial.rename(folder)
