"""TensorFlow's messages as part of a line for people."""

from __future__ import annotations

import re

import tensorflow as tf


def plain(error: Exception) -> str:
    """TensorFlow's message without the names of its nodes."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    text = re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*?\].*", "", text, flags=re.DOTALL)
    return " ".join(text.split())
