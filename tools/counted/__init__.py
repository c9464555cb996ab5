"""A step of a GPU that is not there, counted: what it launches, what that moves, what it keeps in memory."""
