"""The ``mlaudit`` command: one module a command."""
