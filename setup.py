"""Copy model shapes and C sources into the package of a wheel; in the tree they are next to it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOME = Path(__file__).parent / "benchmarks/bert/implementations/pytorch"
FOLDERS = ("configs", "csrc")


class BuildWithFolders(build_py):
    """Copies `FOLDERS`, except for an editable install, which finds them in the tree."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if self.editable_mode:
            return
        for name in FOLDERS:
            shutil.copytree(HOME / name, Path(self.build_lib) / "mlbert" / name, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
