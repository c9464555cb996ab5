"""Run ``mlaudit`` with ``python -m mlaudit``."""

from mlaudit.cli.main import main

main()
