"""Google's BERT pre-training in plain TensorFlow 2. Of this tree it needs `mlbert.core` and `mlbert.data.formats`
only."""
