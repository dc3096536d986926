"""What integer and boolean tensors would hold, and stand-ins where nobody can know it."""
