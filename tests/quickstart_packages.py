"""A virtual environment like the one that quickstart.sh makes: without the packages of any extra."""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from programs import write_program


def make_environment(folder: Path) -> Path:
    """Make the environment, with links to the packages of this one, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for name in needed_packages("mlbert") | {"setuptools"}:
        # By its folder: an egg-info that a build has left in the tree's root has no files.
        distribution = next(iter(metadata.distributions(name=name, path=[sysconfig.get_path("purelib")])))
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / entry).exists():
                (packages / entry).symlink_to(distribution.locate_file(entry))
    write_program(folder / "bin/mlbert", f"#!{python}\nfrom mlbert.cli.main import main\nmain()\n")
    return python


def needed_packages(name: str, *extras: str) -> set[str]:
    """Return a package and what it requires, with these extras, directly and indirectly."""
    found, waiting = set(), [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras))
            if wanted and requirement.name not in found:
                waiting.append((requirement.name, tuple(requirement.extras)))
    return found
