"""The files of this repository, for the tests that read all of them."""

from pathlib import Path

from programs import run_quietly

ROOT = Path(__file__).resolve().parents[2]
EXCLUDED = {".git", ".venv", "third_party", "build", "__pycache__"}


def tree_files() -> list[Path]:
    """Return the files that git tracks or would track;
    without git, everything but build products.
    """
    listed = run_quietly(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT
    )
    if listed.returncode == 0 and (ROOT / ".git").exists():
        names = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [
            name
            for name in names
            if name.parts[0] not in ("runs", "site") and not EXCLUDED & set(name.parts)
        ]
        names = [name for name in names if ".egg-info" not in str(name)]
    return sorted(ROOT / name for name in names if (ROOT / name).is_file())
