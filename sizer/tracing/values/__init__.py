"""Values of integer and boolean tensors on meta, and stand-ins for unknown values."""
