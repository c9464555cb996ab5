"""The parts of ``mlbert pretrain TEXT``: its folder, settings, display and results."""
