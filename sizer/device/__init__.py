"""Real devices: what is there, what a piece of work really takes on one, and how the estimate compares."""
