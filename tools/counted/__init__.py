"""Count a step on a simulated GPU: its launches, the bytes that they move, and its memory."""
