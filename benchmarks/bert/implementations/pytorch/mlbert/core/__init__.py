"""Everything that needs neither torch nor TensorFlow: configuration, rules, schedules, packing, masking, logging."""
