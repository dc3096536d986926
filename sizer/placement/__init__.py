"""Tensors on the wrong device or in the wrong dtype, found by a forward pass on meta tensors, without any device."""
