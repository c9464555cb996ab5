"""What no official tool looks at: each module holds the checks of one kind."""
