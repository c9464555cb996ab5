"""Checks that no official tool makes, one module for each kind."""
