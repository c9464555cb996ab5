"""Official checkers, system descriptions and export of a submission tree."""
