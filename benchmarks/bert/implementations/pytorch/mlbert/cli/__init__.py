"""Command line: ``mlbert --help``."""
