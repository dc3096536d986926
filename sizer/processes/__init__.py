"""Child processes: what travels to and from them, and what they give up before they run. Standard library alone."""
