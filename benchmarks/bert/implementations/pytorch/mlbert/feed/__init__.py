"""From stored sequences to batches on a device."""
