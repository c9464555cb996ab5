"""Check options of a command that depend on each other; one that is not given is None."""

from __future__ import annotations

from collections.abc import Mapping

from mlbert.host.errors import UserError


def first_given(options: Mapping[str, object]) -> str | None:
    """Return the name of the first option that is given, or None."""
    return next((name for name, value in options.items() if value is not None), None)


def refuse_with(option: str, others: Mapping[str, object]) -> None:
    """Raise UserError if one of the others is given together with an option that excludes them."""
    name = first_given(others)
    if name is not None:
        reason = f"cannot be used with {name}"
        raise UserError("config.conflict", option, reason, f"Remove {name}")


def check_at_most_one(options: Mapping[str, object]) -> None:
    """Raise UserError if several of the options are given."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        subject = " and ".join(given)
        raise UserError("config.conflict", subject, "exclude each other", "Give one of them")
