"""Tensors on the wrong device or in the wrong dtype, found by a rehearsal that needs no device."""
