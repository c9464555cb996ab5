"""What pyproject.toml cannot say: shapes and C sources lie beside the package in the tree, inside it in a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOME = Path(__file__).parent / "benchmarks/bert/implementations/pytorch"
FOLDERS = ("configs", "csrc")


class BuildWithFolders(build_py):
    """Copies them; an editable install finds them in the tree."""

    def run(self) -> None:
        """Builds."""
        super().run()
        for name in () if self.editable_mode else FOLDERS:
            shutil.copytree(HOME / name, Path(self.build_lib) / "mlbert" / name, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
