"""Ranks, gradient reduction and sharded evaluation."""
