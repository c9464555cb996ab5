"""Predict time, samples, memory and cost of a run with a model of few parameters,
fitted on published results.
"""
