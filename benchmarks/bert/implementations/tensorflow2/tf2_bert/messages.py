"""Shorten TensorFlow's messages for user-facing errors."""

from __future__ import annotations

import re

import tensorflow as tf


def plain(error: Exception) -> str:
    """Return TensorFlow's message in one line, without node names."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    text = re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*?\].*", "", text, flags=re.DOTALL)
    return " ".join(text.split())
