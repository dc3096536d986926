"""Values that integer and boolean tensors would hold, and stand-ins for unknown values."""
