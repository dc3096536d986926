"""What integer and boolean tensors would hold, and stand-ins where it is unknown."""
