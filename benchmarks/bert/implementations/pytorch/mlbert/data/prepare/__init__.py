"""Offline steps from text to shards that training reads."""
