"""Corrections of meta tensors that behave unlike a device's: constructors, autocast, strides, in-place accumulation."""
