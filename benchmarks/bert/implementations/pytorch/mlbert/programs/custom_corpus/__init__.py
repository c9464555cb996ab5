"""The parts of ``mlbert pretrain TEXT``: its folder, its settings, what it shows, what it leaves."""
