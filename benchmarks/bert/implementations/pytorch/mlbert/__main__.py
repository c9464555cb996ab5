"""``python -m mlbert`` is the ``mlbert`` command."""

from mlbert.cli.main import main

main()
