"""Google's BERT pre-training in plain TensorFlow 2,
on the data formats and checkpoints of `mlbert`.
"""
