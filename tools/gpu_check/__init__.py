"""Tests and measurements that need a GPU, and the oracles that every op is judged by;
see docs/gpu.md.
"""
